"""`slipstream bench compare` on a tiny pair: its figures against the engine's counters, its tables, its refusals."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from cluster.check import engine_run
from cluster.cli import bench
from protos.errors import ConfigError, ModelError
from slipstream import LLM, SamplingParams
from tests.support import check_bugs
from tests.support.models import tiny_models, tiny_pairs

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
ENGINE = ["--dtype", "float32", "--enforce-eager", "--block-size", "8"]
MAX_TOKENS = 20
QUESTIONS = [
    {"question_id": 1, "category": "qa", "turns": ["why is it so?"]},
    {"question_id": 2, "category": "qa", "turns": ["0101010101"]},
    {"question_id": 3, "category": "talk", "turns": ["aabbaabb", "and then?"]},
    {"question_id": 4, "category": "qa", "turns": ["zzz"]},
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a draft that is right more often than not."""
    return tiny_pairs.build(tmp_path_factory.mktemp("pair"), "llama", noise=0.02)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / "question.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    return path


def compare(pair: tuple[Path, Path], dataset: Path, *given: str) -> tuple[int, dict[str, Any]]:
    """Run the command in this process; return its exit status and its figures."""
    output = dataset.with_name("figures.json")
    words = ["compare", str(pair[0]), "--dataset", str(dataset), "--output", str(output), *ENGINE]
    status = bench.app([*words, "--max-tokens", str(MAX_TOKENS), *given], standalone_mode=False)
    return status or 0, json.loads(output.read_text())


def drafted(pair: tuple[Path, Path], **keys: Any) -> str:
    return json.dumps({"model": str(pair[1]), "num_speculative_tokens": 2, **keys})


# Figures.


def counted(pair: tuple[Path, Path], speculative: dict[str, Any], rows: Sequence[dict[str, Any]]) -> float:
    """Return tokens per step by the counters of an engine that holds the conversations one by one."""
    fixed = {**speculative, "policy": "fixed"}
    tokenizer = AutoTokenizer.from_pretrained(pair[0])
    options: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "block_size": 8, "max_model_len": 256}
    with LLM(str(pair[0]), speculative_config=fixed, num_gpu_blocks_override=64, **options) as llm:
        for row in rows:
            messages: list[dict[str, str]] = []
            for turn in row["turns"]:
                messages.append({"role": "user", "content": turn})
                params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
                [result] = llm.chat(messages, params, use_tqdm=False)
                text = tokenizer.decode(result.outputs[0].token_ids, skip_special_tokens=True)
                messages.append({"role": "assistant", "content": text})
        stats = llm.stats()
    return stats.generated_tokens / stats.steps


def test_accepted_tokens_are_those_of_the_engines_counters(
    pair: tuple[Path, Path], dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = ["--methods", f"small={drafted(pair)}", "--methods", f"lookup={json.dumps(NGRAM)}"]
    status, found = compare(pair, dataset, *methods, "--ignore-eos")
    assert (status, found["categories"]) == (0, ["qa", "talk"])
    by_name = {method["name"]: method for method in found["methods"]}
    for name, keys in (("small", json.loads(drafted(pair))), ("lookup", NGRAM)):
        method = by_name[name]
        assert method["overall"]["mean_accepted_tokens"] == pytest.approx(counted(pair, keys, QUESTIONS))
        of_talk = method["categories"]["talk"]
        assert of_talk["mean_accepted_tokens"] == pytest.approx(counted(pair, keys, QUESTIONS[2:3]))
        assert method["overall"]["mean_accepted_tokens"] > 1
        for side in ("plain", "method"):
            assert method["overall"][side]["tokens"] == 5 * MAX_TOKENS
        assert method["overall"]["plain"]["steps"] == 5 * MAX_TOKENS
        assert (method["answers"]["identical"], method["answers"]["sequences"]) == (5, 5)
        assert method["answers"]["violations"] == 0
    shown = capsys.readouterr().out
    assert "small: 5 of 5 answers equal those of plain decoding" in shown
    assert "4 questions of 5 turns in 4 blocks; batch size 1, greedy, answers of 20 tokens" in shown
    assert f"| small  | {by_name['small']['categories']['qa']['mean_accepted_tokens']:.2f}" in shown


def test_a_batch_is_of_one_category_and_changes_no_count(pair: tuple[Path, Path], dataset: Path) -> None:
    given = ["--methods", drafted(pair), "--ignore-eos"]
    _, alone = compare(pair, dataset, *given)
    _, together = compare(pair, dataset, *given, "--batch-size", "2")
    [alone], [together] = alone["methods"], together["methods"]
    assert [block["category"] for block in together["blocks"]] == ["qa", "talk", "qa"]
    for key in ("tokens", "steps"):
        assert together["overall"]["method"][key] == alone["overall"]["method"][key]
    assert together["answers"]["violations"] == 0


def test_no_method_profits_from_questions_of_another(
    pair: tuple[Path, Path], dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hits, close = [], engine_run.EngineRun.__exit__

    def noted(run: engine_run.EngineRun, *given: Any) -> None:
        hits.append(run._engine.stats().prefix_hits)
        close(run, *given)

    monkeypatch.setattr(engine_run.EngineRun, "__exit__", noted)
    rows = [{"category": "qa", "turns": [letter * 20]} for letter in "abc"]  # two blocks and more of a prompt each
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
    methods = ["--methods", f"a={json.dumps(NGRAM)}", "--methods", "b=suffix", "--no-chat"]
    assert compare(pair, dataset, *methods)[0] == 0
    assert hits == [0, 0, 0]


def test_sampled_answers_are_compared_where_the_rule_promises_them(
    pair: tuple[Path, Path], dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    standard = drafted(pair, rejection_sample_method="standard", name="standard")
    status, found = compare(pair, dataset, "--methods", drafted(pair), "--methods", standard, "--temperature", "0.7")
    assert status == 0
    coupled, other = found["methods"]
    assert (coupled["answers"]["part"], coupled["answers"]["violations"], other["answers"]) == ("seeded", 0, None)
    assert "standard: rule 'standard' does not promise the sampled answers" in capsys.readouterr().out


def test_a_lossy_method_is_found(
    pair: tuple[Path, Path], dataset: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check_bugs.plant(monkeypatch, "lenient")
    status, found = compare(pair, dataset, "--methods", f"bad={drafted(pair)}", "--max-tokens", "40", "--ignore-eos")
    assert status == 1
    assert found["methods"][0]["answers"]["violations"] > 0
    assert re.search(r"VIOLATED: bad: \d answers differ WITHOUT a tie", capsys.readouterr().out)


def test_a_method_that_never_drafts_is_named(
    pair: tuple[Path, Path], dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    never = json.dumps({**NGRAM, "prompt_lookup_min": 60, "prompt_lookup_max": 60})
    status, found = compare(pair, dataset, "--methods", never, "--num-prompts", "1")
    assert (status, found["methods"][0]["overall"]["mean_accepted_tokens"]) == (0, 1)
    assert "WARNING: ngram proposed no draft tokens" in capsys.readouterr().out


def test_questions_that_do_not_fit_are_left_out(
    pair: tuple[Path, Path], dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = compare(pair, dataset, "--methods", json.dumps(NGRAM), "--max-model-len", "70")
    assert (status, found["categories"]) == (0, ["qa"])
    assert "1 of 4 questions do not fit the context of 70 tokens with answers of 20 and were left out" in (
        capsys.readouterr().out
    )


def test_a_turn_that_outgrows_the_context_is_not_asked(
    pair: tuple[Path, Path], dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Random answers are hardly ever text, and what is none has more tokens when it is tokenized again."""
    length = len("user: aabbaabb\nassistant: \nuser: and then?\nassistant:") + 2 * MAX_TOKENS
    dataset.write_text(json.dumps(QUESTIONS[2]) + "\n")
    given = ["--methods", json.dumps(NGRAM), "--ignore-eos", "--max-model-len", str(length)]
    status, found = compare(pair, dataset, *given)
    assert (status, found["methods"][0]["overall"]["method"]["tokens"]) == (0, MAX_TOKENS)
    assert "ngram: turns not asked because they did not fit the context: 1" in capsys.readouterr().out


def test_the_plot_has_every_category(tmp_path: Path, pair: tuple[Path, Path], dataset: Path) -> None:
    page = tmp_path / "plot.html"
    compare(pair, dataset, "--methods", f"<a>={json.dumps(NGRAM)}", "--num-prompts", "2", "--plot", str(page))
    text = page.read_text()
    assert "&lt;a&gt;" in text
    assert "<a>" not in text
    for place in ("qa", "talk", "overall"):
        assert f">{place}</text>" in text
    assert text.count("<circle") == 3
    assert "<polyline" not in text


@pytest.fixture
def unloadable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever is wrong must be found before an engine is built."""

    def fail(*_: Any) -> None:
        raise AssertionError("an engine was built")

    monkeypatch.setattr(engine_run, "make_engine", fail)
    return


@pytest.mark.usefixtures("unloadable")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--methods", "ngrm"], "method 'ngrm' is neither a method, a folder, nor a Hub id, did you mean 'ngram'"),
        (["--methods", "eagle3"], "method 'eagle3' needs a model"),
        (["--methods", ""], "method '' is neither"),
        (["--methods", "{}"], "a method must be a JSON object that names a method or a model"),
        (["--methods", "x={"], "not valid JSON"),
        (["--methods", "ngram,suffix,ngram"], "two drafts are called 'ngram': give one of them another `name`"),
        (["--methods", "plain=ngram"], "'plain' is plain decoding"),
        (["--methods", "/nowhere/draft"], "/nowhere/draft"),
        (
            ["--methods", '{"method": "ngram", "rejection_sample_method": "synthetic", '
             '"synthetic_acceptance_length": 2}'],
            "'synthetic' changes answers on purpose",
        ),
        (["--methods", "ngram", "--plot", "x.pdf"], "plot must be a .html or .png file, got x.pdf"),
        (["--methods", "ngram", "--plot", "/nowhere/x.html"], "there is no folder /nowhere"),
        (["--methods", "ngram", "--output", "/nowhere/x.json"], "there is no folder /nowhere"),
        (["--methods", "ngram", "--output", "/"], "/ cannot be written: it is a folder"),
        (["--methods", "ngram", "--max-model-len", "30"], "fits the context of 30 tokens .* the shortest needs"),
        (["--methods", "ngram", "--dataset", "/nowhere.jsonl"], "cannot read /nowhere.jsonl"),
    ],
)  # fmt: skip
def test_refusals(pair: tuple[Path, Path], dataset: Path, given: list[str], message: str) -> None:
    with pytest.raises((ConfigError, ModelError), match=message):
        compare(pair, dataset, *given)


def test_methods_without_commas_are_not_taken_for_a_model(dataset: Path) -> None:
    with pytest.raises(ConfigError, match="the model is given as 'suffix', which is a method: separate methods by"):
        bench.app(["compare", "--methods", "ngram", "suffix", "--dataset", str(dataset)], standalone_mode=False)


@pytest.mark.usefixtures("unloadable")
def test_a_draft_with_another_tokenizer_is_refused(pair: tuple[Path, Path], dataset: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    tiny_models.perturb(pair[1], other)
    tokenizer = AutoTokenizer.from_pretrained(pair[1])
    text = json.loads(tokenizer.backend_tokenizer.to_str())
    ids = text["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    tokenizer.save_pretrained(other)
    (other / "tokenizer.json").write_text(json.dumps(text))
    with pytest.raises(ModelError, match="they must share a tokenizer"):
        compare(pair, dataset, "--methods", str(other))
