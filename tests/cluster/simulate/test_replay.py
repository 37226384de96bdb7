"""`slipstream simulate` on small logs: figures by hand, foreign logs, refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

import demo
from cluster.cli import main as cli
from cluster.simulate.recorded import match
from protos.draft import Draft
from protos.errors import ConfigError, SlipstreamError

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 2}
MODEL = ["--model", str(demo.pair()[0]), "--max-model-len", "64"]


def simulate(log: Path, *given: str, draft: dict[str, Any] | None = None) -> None:
    cli.app(["simulate", str(log), "--draft", json.dumps(draft or NGRAM), *given], standalone_mode=False)


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Two answers. After 5 6 7 8 in the prompt, 5 6 is followed by 7 8 again.

    First answer: step 1 knows 1 5 6 7 8 5 6, drafts 7 8 5, the log has 7 8 9: two match. Step 2 knows .. 8 9: no match
    of two tokens, so no draft, one token: 4. Second answer: nothing repeats.
    """
    first = {"prompt_token_ids": [1, 5, 6, 7, 8, 5, 6], "output_token_ids": [7, 8, 9, 4], "finish_reason": "stop"}
    return write(tmp_path / "log.jsonl", first, {"prompt_token_ids": [1, 2], "output_token_ids": [3, 4]})


def test_the_figures_are_those_computed_by_hand(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    matched, figures = tmp_path / "matched.jsonl", tmp_path / "figures.json"
    simulate(log, *MODEL, "--matched", str(matched), "--json", str(figures))
    shown = capsys.readouterr()
    assert "Average tokens matched per prompt: [1.0, 0.0]" in shown.out  # 2 in 2 steps, 0 in 2
    assert "Average tokens matched per dataset: [0.5]" in shown.out
    assert (
        "mean acceptance length: 3.00 tokens per step with a draft (2 of 3 draft tokens accepted), 1.50 per"
        in shown.out
    )
    assert "acceptance by depth: 100%, 100%, 0%" in shown.out
    assert "2 answers: greedy: draft tokens equal to the logged ones are accepted" in shown.out
    assert "2 of 2 answers do not say how they were sampled" in shown.err
    lines = [json.loads(line) for line in matched.read_text().splitlines()]
    assert [line["matched"] for line in lines] == [[2, 2], [0, 0]]
    [found] = json.loads(figures.read_text())["replays"]
    assert (found["tokens_per_step"], found["num_steps"], found["mean_acceptance_length"]) == (1.5, 4, 3.0)


def test_no_token_follows_a_draft_token_that_ends_an_answer(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", {"prompt": [5, 6, 7, 8, 9, 5, 6], "output": [7, 8, 9]})
    figures = tmp_path / "figures.json"
    simulate(log, *MODEL, "--json", str(figures))
    [found] = json.loads(figures.read_text())["replays"]
    assert (found["num_steps"], found["num_accepted_draft_tokens"], found["tokens_per_step"]) == (1, 3, 3.0)


def test_each_log_is_a_dataset_and_each_number_of_draft_tokens_a_replay(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write(tmp_path / "other.jsonl", {"prompt_token_ids": [5, 6, 7, 5, 6], "output_token_ids": [7, 5]})
    simulate(log, str(other), *MODEL, "--k", "1, 2", draft={**NGRAM, "name": "lookup"})
    shown = capsys.readouterr().out
    assert "lookup, K = 1\n" in shown
    assert "per dataset: [0.2, 1.0]" in shown  # one in five steps, one in one
    assert "lookup, K = 2\n" in shown
    assert "│ lookup │ 2 │" in shown  # a row of the table


def test_foreign_logs_have_text_under_any_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "log.jsonl", {"question": "import os\nimport os\n", "reply": "import os\nimport os\n"}, "")
    simulate(path, *MODEL, "--prompt-field", "question", "--output-field", "reply")
    shown = capsys.readouterr()
    assert "1 of 1 answers are text: their tokens are those of the tokenizer" in shown.err
    assert "mean acceptance length" in shown.out


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", ":1 is not JSON"),
        ("5", ":1 must be a JSON object, got 5"),
        ('{"prompt": ' + "[" * 100_000, ":1 is not JSON: it is nested too deeply"),
        ({"prompt": [1], "output": [1], "temperature": 10**400}, ":1: sampling: temperature"),
        (
            {"text": "x"},
            ":1 has no field 'prompt_token_ids' or 'prompt', but text: name the right one with --prompt-field",
        ),
        ({"prompt": "x", "output": 3}, ":1: the output must be text or a list of token ids, got 3"),
        ({"prompt": [1, -1], "output": "x"}, ":1: the prompt must be text or a list of token ids"),
        ({"prompt": [1], "output": [99999]}, ":1: output has token id 99999; ids are from 0"),
        ({"prompt": [99999], "output": [1]}, ":1: prompt has token id 99999; ids are from 0"),
        ({"prompt": [1], "output": "\ud800"}, ":1: output has a lone surrogate"),
        ({"prompt": [1], "output": [1] * 64}, ":1: prompt and output have 65 tokens, but the context has 64"),
        ({"prompt": [1], "output": [1], "sampling": {"temperature": -1}}, ":1: sampling: temperature"),
        (
            {"prompt": [1], "output": [1], "sampling": {"seed": "x"}},
            ":1: seed must be a whole number of at least 0, got 'x'",
        ),
        ({"prompt": [1], "output": [1], "seed": -1}, ":1: seed must be a whole number of at least 0, got -1"),
        ({"prompt": [1], "output": [1], "sampling": {"heat": 1}}, ":1: sampling: unknown argument 'heat'"),
        ({"prompt": [1], "output": [1], "temperature": "hot"}, ":1: sampling: temperature must be"),
        ({"prompt": [1], "output": [1], "temperature": 1, "seed": 2**70}, ":1: seed"),
        ({"prompt": "", "output": [1]}, ":1: prompt"),
        ({"prompt": [1], "output": []}, "has no answers to replay"),
        ("", "has no answers to replay"),
    ],
)
def test_bad_logs_are_named_by_line(tmp_path: Path, line: Any, says: str) -> None:
    with pytest.raises(SlipstreamError, match=says):
        simulate(write(tmp_path / "log.jsonl", line), *MODEL)


def test_log_probabilities_that_are_no_numbers_are_named_by_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "log.jsonl", {"prompt": [1], "output": [2], "logprobs": [{"2": 10**400}]})
    with pytest.raises(ConfigError, match=":1: log-probabilities must be a list"):
        simulate(path, *MODEL, "--logprobs-field", "logprobs")
    simulate(path, *MODEL)
    assert "the log-probabilities of 1 answers are not" in caplog.text


def test_empty_answers_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "log.jsonl", {"prompt": [1], "output": []}, {"prompt": [1], "output": [2]})
    simulate(path, *MODEL)
    assert "1 answers are empty and left out" in caplog.text
    assert "1 answers: greedy" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--matched", "--json", "--html", "--png"])
def test_what_is_read_is_not_written(log: Path, option: str) -> None:
    before = log.read_text()
    with pytest.raises(ConfigError, match=r"log\.jsonl cannot be written: it is read, too"):
        simulate(log, *MODEL, option, str(log))
    assert log.read_text() == before


@pytest.mark.parametrize(
    ("given", "draft", "says"),
    [
        ([], NGRAM, "the log does not name the target: give --model"),
        ([*MODEL, "--k", "0"], NGRAM, "k must be numbers from 1 on"),
        ([*MODEL, "--draft", json.dumps(NGRAM)], NGRAM, "two drafts are called 'ngram'"),
        ([*MODEL, "--matched", "/nowhere/m"], NGRAM, "there is no folder /nowhere to write m to"),
        ([*MODEL, "--json", "/"], NGRAM, "/ cannot be written: it is a folder"),
        ([*MODEL, "--json", "x", "--html", "./x"], NGRAM, "x cannot be written: it is written, too"),
        (MODEL, {"method": "lookahead"}, "method 'lookahead' drafts with the target: give --target"),
        (
            MODEL,
            {"method": "medusa", "model": str(demo.head("medusa"))},
            "method 'medusa' reads hidden states .* --target",
        ),
        ([*MODEL, "-tp", "2"], NGRAM, "a replay runs in one process"),
        (
            MODEL,
            {**NGRAM, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0},
            "'synthetic' accepts at given rates",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:rejection_sample_method 'synthetic'")
def test_refusals(log: Path, given: list[str], draft: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        simulate(log, *given, draft=draft)


def test_the_rule_by_which_acceptance_was_found_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = {"prompt": [1, 2], "output": [3]}
    settings: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1, "seed": 3}, {"temperature": 1}]
    path = write(tmp_path / "log.jsonl", *({**one, "sampling": each} for each in settings))
    simulate(path, *MODEL, "--enforce-eager", draft={"model": str(demo.pair()[1]), "num_speculative_tokens": 2})
    shown = capsys.readouterr()
    for rule in ("greedy: draft", "coupled: drafted with the noise", "sampled without a logged seed: the draft's most"):
        assert f"1 answers: {rule}" in shown.out
    assert "do not say how they were sampled" not in shown.err
    simulate(path, *MODEL)
    assert "2 answers: sampled: the draft depends on no noise" in capsys.readouterr().out


def test_sampled_answers_are_not_replayed_under_rules_that_draw_drafts(tmp_path: Path) -> None:
    sampled = {"prompt": [1], "output": [2, 3], "sampling": {"temperature": 1.0, "seed": 3}}
    path = write(tmp_path / "log.jsonl", sampled)
    draft = {"model": str(demo.pair()[1]), "num_speculative_tokens": 2, "rejection_sample_method": "standard"}
    with pytest.raises(ConfigError, match=":1 was sampled, and rejection_sample_method 'standard' draws"):
        simulate(path, *MODEL, "--enforce-eager", draft=draft)


def test_a_draft_is_matched_along_its_tree_up_to_the_end_of_the_answer() -> None:
    chain, tree = Draft((4, 5, 6)), Draft((9, 4, 5), (-1, -1, 1))
    assert match(chain, [3, 4, 5, 8], 1) == ([0, 1], [4, 5, 8])
    assert match(chain, [4, 5], 0) == ([0, 1], [4, 5, 0])  # what comes after the end is never committed
    assert match(tree, [4, 5, 7], 0) == ([1, 2], [4, 5, 7])
    assert match(Draft(()), [4], 0) == ([], [4])
