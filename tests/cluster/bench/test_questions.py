"""The questions of `slipstream bench compare`: what is read from files, and the prompts they become."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from cluster.bench.prompting import QuestionPrompts
from cluster.bench.questions import MT_BENCH, MT_BENCH_NAME, Question, read_questions
from protos.config.engine import ModelConfig
from protos.errors import ConfigError
from runtime.text.tokenizer import load_tokenizer
from tests.support.models import tiny_pairs

QUESTION_JSONL = """\
{"question_id": 81, "category": "qa", "turns": ["Who wrote it?"]}
{"question_id": 82, "category": "qa", "turns": ["When?"], "reference": ["1851"]}

{"question_id": 83, "category": "rag", "turns": ["Where?", "Why there?", "And then?"]}
{"question_id": "x", "category": " qa ", "turns": ["How?"]}
"""


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_spec_bench_questions_are_read_category_by_category(tmp_path: Path) -> None:
    path = tmp_path / "question.jsonl"
    path.write_text(QUESTION_JSONL)
    found = read_questions(path, limit=3, max_turns=2)
    assert found == [
        Question(f"{path}:1", "qa", ("Who wrote it?",)),
        Question(f"{path}:4", "rag", ("Where?", "Why there?")),
        Question(f"{path}:2", "qa", ("When?",)),
    ]
    assert [question.turns[-1] for question in read_questions(path, 80, 9)] == [
        "Who wrote it?",
        "And then?",
        "When?",
        "How?",
    ]


def test_mt_bench_is_one_category_where_it_is_whole(tmp_path: Path) -> None:
    rows = [{"category": category, "turns": ["a", "b"]} for category in sorted(MT_BENCH)]
    whole = written(tmp_path / "whole.jsonl", *rows, {"category": "qa", "turns": ["c"]})
    assert {question.category for question in read_questions(whole, 80, 2)} == {MT_BENCH_NAME, "qa"}
    part = written(tmp_path / "part.jsonl", *rows[1:])
    assert {question.category for question in read_questions(part, 80, 2)} == {row["category"] for row in rows[1:]}


def test_sharegpt_gives_the_turns_of_its_users(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "talk.json"
    said = [("system", "Be brief."), ("human", "why?"), ("gpt", "because"), ("user", "really?"), ("gpt", "yes")]
    talk = {"id": "1", "conversations": [{"from": who, "value": text} for who, text in said]}
    path.write_text(json.dumps([talk, {"conversations": [{"from": "gpt", "value": "hi"}]}, {"conversations": []}]))
    history = ({"role": "system", "content": "Be brief."},)
    assert read_questions(path, 80, 2) == [Question(f"{path}: item 1", "talk", ("why?", "really?"), history)]
    assert "2 conversations have no turn of a user" in caplog.text


def test_lines_of_prompts_are_what_generate_and_bench_serve_read(tmp_path: Path) -> None:
    logged = {"prompt_token_ids": [5, 6], "prompt": "ab", "output": "c", "output_token_ids": [7]}
    unasked = {"turns": [], "prompt": "y"}
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    lines = written(
        tmp_path / "mine.jsonl", "def f(", {"prompt": "x", "category": "code"}, {"messages": talk}, logged, unasked
    )
    assert read_questions(lines, 80, 2) == [
        Question(f"{lines}:1", "mine", ("def f(",), is_chat=False),
        Question(f"{lines}:2", "code", ("x",), is_chat=False),
        Question(f"{lines}:3", "mine", ("c",), tuple(talk[:2])),
        Question(f"{lines}:4", "mine", ((5, 6),), is_chat=False),
        Question(f"{lines}:5", "mine", ("y",), is_chat=False),
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question_id": 1, "category": "qa"}, r":1 has none of the fields 'turns', .*, but category, question_id"),
        ({"category": "qa", "turns": []}, r":1: turns must be a list of at least one text, got \[\]"),
        ({"category": "qa", "turns": "why?"}, ":1: turns must be a list of at least one text, got 'why"),
        ({"category": "qa", "turns": ["a", 7]}, ":1: turn 2 must be text, got 7"),
        ({"category": "qa", "turns": [" "]}, ":1: turn 1 must be text, got ' '"),
        ({"turns": ["a"]}, ":1 has no category"),
        ({"category": 3, "turns": ["a"]}, ":1: category must be text, got 3"),
        ({"category": ["qa"], "turns": ["a"]}, r":1: category must be text, got \['qa'\]"),
        (7, ":1 must be text or a JSON object, got 7"),
        ({"prompt": ""}, ":1: prompt must be text, got ''"),
        ({"prompt_token_ids": ["a"]}, ":1: prompt_token_ids must be a list of token ids"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, ":1: messages must end with one of role 'user'"),
        ({"messages": [{"role": "user"}]}, ":1: each of messages must have the texts 'role' and 'content'"),
        ({"conversations": [{"from": "human"}]}, ":1: each of conversations must have the texts 'from' and 'value'"),
        ({"conversations": "hi"}, ":1: conversations must be a list, got 'hi'"),
        ({"conversations": []}, "has no questions"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_questions(written(tmp_path / "question.jsonl", row), 80, 2)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("question.jsonl", "", "has no questions"),
        ("question.jsonl", "{", "question.jsonl:1 is not JSON"),
        ("question.jsonl", None, "cannot read .*question.jsonl: no such file"),
        ("question.jsonl", "[" * 100_000, "question.jsonl:1 is not JSON: it is nested too deeply"),
        ("talk.json", "{}", "must hold a list, got dict"),
        ("talk.json", "[3]", "item 1 must be text or a JSON object, got 3"),
        ("talk.json", None, "cannot read .*talk.json: no such file"),
        ("prompts.txt", "a", "dataset must be a .jsonl file, or a .json file"),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_questions(path, 80, 2)


# Prompts.


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_pairs.build(tmp_path_factory.mktemp("pair"), "llama")[0]


def prompts(target: Path, *, uses_template: bool) -> QuestionPrompts:
    return QuestionPrompts(load_tokenizer(ModelConfig(str(target))), 259, uses_template=uses_template)


TALK = Question("here", "qa", ("why?", "really?"), ({"role": "system", "content": "Be brief."},))


def test_the_models_answer_is_part_of_the_next_prompt(target: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(target)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "why?"},
        {"role": "assistant", "content": "because"},
        {"role": "user", "content": "really?"},
    ]
    made = prompts(target, uses_template=True)
    for answers, said in (([], messages[:2]), (["because"], messages)):
        text = theirs.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
        assert made.ids(TALK, answers) == tuple(theirs.encode(text, add_special_tokens=False))
    assert made.most_tokens(TALK, 10) == len(made.ids(TALK, [""])) + 20
    assert made.most_tokens(TALK, 10, growth=3) == len(made.ids(TALK, [""])) + 40


def test_without_a_template_what_was_said_is_joined(target: Path) -> None:
    made = prompts(target, uses_template=False)
    assert made.text(made.ids(TALK, ["because"])) == "Be brief.\nwhy?\nbecause\nreally?"
    text = Question("here", "qa", ("def f(",), is_chat=False)
    assert prompts(target, uses_template=True).ids(text) == made.ids(text)


def test_token_ids_need_no_tokenizer() -> None:
    made = QuestionPrompts(None, 96, uses_template=False)
    assert made.ids(Question("here", "qa", ((5, 6),), is_chat=False)) == (5, 6)
    with pytest.raises(ConfigError, match="there: prompt has token id 96; ids are from 0 to 95"):
        made.ids(Question("there", "qa", ((5, 96),), is_chat=False))
    with pytest.raises(ConfigError, match="here: prompt is text, but skip_tokenizer_init is set"):
        made.ids(TALK)
