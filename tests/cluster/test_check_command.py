"""`slipstream check` as users run it: it passes without bugs, and names a planted bug."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from cluster.check import coverage
from cluster.check.answers import Answer, DraftCounts
from cluster.check.distribution import DistributionVerdict
from cluster.check.identity import ALLOWANCES, IdentityVerdict
from cluster.check.report import Report, Setting, verdict_line
from cluster.cli import check as cli_check
from cluster.cli import main as cli
from protos.errors import ConfigError
from tests.support import check_bugs
from tests.support.models import tiny_pairs
from tests.support.processes import slipstream

NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
SMALL = ["--dtype", "float32", "--num-gpu-blocks-override", "512", "--enforce-eager", "--block-size", "8"]
SIZE = ["--num-prompts", "6", "--max-tokens", "24", "--samples", "100", "--temperature", "0.4"]
PROMPTS = ["aabbab", "the quick brown fox", "x = x + 1\ny = y + 1\n", "0101010", "zzz", "def f(x): return f(f(x))"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a draft that is right more often than not."""
    return tiny_pairs.build(tmp_path_factory.mktemp("pair"), "llama", noise=0.02)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(text) + "\n" for text in PROMPTS))
    return path


@pytest.fixture
def given(pair: tuple[Path, Path], prompts: Path) -> list[str]:
    """The command over the pair, small."""
    return options(pair, prompts, drafted(pair))


def drafted(pair: tuple[Path, Path], **keys: Any) -> dict[str, Any]:
    return {"model": str(pair[1]), "num_speculative_tokens": 2, **keys}


def options(pair: tuple[Path, Path], prompts: Path, speculative: dict[str, Any] | None) -> list[str]:
    return [
        "check",
        str(pair[0]),
        "--speculative-config",
        json.dumps(speculative),
        *SMALL,
        *SIZE,
        "--prompts",
        str(prompts),
    ]


def run(given: list[str], output: Path) -> tuple[int, dict[str, Any]]:
    """Run the command in this process; return its exit status and its report."""
    status = cli.app([*given, "--json", str(output)], standalone_mode=False)
    return status or 0, json.loads(output.read_text())


# Without bugs.


def test_a_right_engine_passes(
    pair: tuple[Path, Path], prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, report = run(options(pair, prompts, drafted(pair)), tmp_path / "report.json")
    assert (status, report["passed"], report["verdict"]) == (0, True, "passed: speculation changes nothing")
    assert (report["rule"], report["dtype"], report["missing"]) == ("coupled", "float32", [])
    counts = report["with_speculation"]
    assert counts["proposed"] > counts["accepted"] > 0
    assert report["without"] == {"proposed": 0, "accepted": 0}
    for part in ("greedy", "seeded"):
        assert (report[part]["sequences"], report[part]["tokens"], report[part]["violations"]) == (6, 144, 0)
    places = {place["place"]: place for place in report["law"]["places"]}
    assert {"prompt", "guess", "draft", "correction", "bonus"} <= places.keys()
    assert all(places[place]["groups"] > 0 for place in ("prompt", "guess", "draft", "correction"))
    assert sum(place["tokens"] for place in places.values()) == 4 * 100 * 8
    shown = capsys.readouterr().out
    assert "passed: speculation changes nothing" in shown
    assert "6 of 6 sequences of 24 tokens are identical" in " ".join(shown.replace("│", " ").split())


@pytest.mark.parametrize(
    ("dtype", "end"),
    [
        ("bfloat16", "--dtype float32 makes them rare, --batch-invariant excludes them"),
        ("float32", "of float32; --batch-invariant excludes them"),
    ],
)
def test_ties_are_not_nothing(dtype: str, end: str) -> None:
    some, none = (IdentityVerdict("greedy", 6, 144, 6 - ties, ties, 0, None, (), "") for ties in (2, 0))
    nothing = DistributionVerdict((), (), 1e-6, 1e-9)
    setting = Setting(6, 24, 4, 100, 8, 1.0, 0)
    counts = DraftCounts(9, 5), DraftCounts(0, 0)
    report = Report(dtype, "coupled", False, ALLOWANCES[dtype], setting, *counts, (), some, some, nothing)
    line = verdict_line(report)
    assert line.startswith("passed: speculation changes nothing but ties: 4 of 12 answers differ")
    assert line.endswith(end)
    assert verdict_line(structs.replace(report, greedy=none, seeded=None)) == "passed: speculation changes nothing"


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_rejection_sampling_is_not_held_to_seeded_identity(
    pair: tuple[Path, Path], prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], rule: str
) -> None:
    given = options(pair, prompts, drafted(pair, rejection_sample_method=rule))
    status, report = run([*given, "--num-prompts", "2"], tmp_path / "report.json")
    assert (status, report["rule"], report["seeded"]) == (0, rule, None)
    assert report["greedy"]["passed"]
    assert "skipped" in capsys.readouterr().out


# Planted bugs.


@pytest.mark.parametrize(
    ("bug", "origin", "explanation"),
    [
        ("lenient", "an accepted draft token", "draft tokens were accepted that are not the target's choice"),
        ("bonus by other noise", "a bonus token", "the token after a fully accepted draft is not the target's choice"),
        ("index off by one", "", "are what the target chooses with the noise of the position after"),
    ],
)
def test_planted_bugs_are_found_and_explained(
    given: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    bug: str,
    origin: str,
    explanation: str,
) -> None:
    check_bugs.plant(monkeypatch, bug)
    status, report = run([*given, "--num-prompts", "3"], tmp_path / "report.json")
    assert (status, report["passed"]) == (1, False)
    assert "identity" in report["verdict"]
    part = report["greedy" if bug == "lenient" else "seeded"]  # the other rows sample, with other noise
    assert part["violations"] > 0
    assert explanation in part["why"]
    wrong = [finding for finding in part["findings"] if not finding["is_tie"]]
    assert all(finding["behind"] > 1e-4 for finding in wrong)
    assert {finding["origin"] for finding in wrong} == {origin} or not origin
    shown = capsys.readouterr().out
    assert f"VIOLATED: {report['verdict'].removeprefix('VIOLATED: ')}" in shown
    assert "NO TIE" in shown


def test_a_wrong_distribution_is_found_where_identity_is_not_promised(
    pair: tuple[Path, Path],
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    check_bugs.resample_from_p(monkeypatch)
    standard = drafted(pair, rejection_sample_method="standard")
    given = [*options(pair, prompts, standard), "--samples", "900"]
    status, report = run(given, tmp_path / "report.json")
    assert (status, report["verdict"]) == (1, "VIOLATED: the sampled distribution")
    assert report["greedy"]["passed"]
    assert any(not test["passed"] for test in report["law"]["tests"] + report["law"]["places"])
    assert "distribution is WRONG" in " ".join(capsys.readouterr().out.replace("│", " ").split())


# Inconclusive runs.


def test_speculation_that_never_drafts_shows_nothing(pair: tuple[Path, Path], prompts: Path, tmp_path: Path) -> None:
    never = {**NGRAM, "prompt_lookup_min": 60, "prompt_lookup_max": 60}
    status, report = run([*options(pair, prompts, never), "--num-prompts", "1"], tmp_path / "report.json")
    assert (status, report["passed"]) == (1, False)
    assert report["verdict"].startswith("NOT SHOWN: nothing was drafted")


def test_what_must_have_happened() -> None:
    some, none = DraftCounts(9, 4), DraftCounts(0, 0)
    assert coverage.missing_outcomes(some, none) == ()
    for with_speculation, without, message in (
        (none, none, "nothing was drafted"),
        (DraftCounts(9, 0), none, "no draft token was accepted"),
        (DraftCounts(9, 9), none, "no draft token was rejected"),
        (some, some, "without speculation scored 9 draft tokens"),
    ):
        (text,) = coverage.missing_outcomes(with_speculation, without)
        assert message in text


def test_each_part_must_have_accepted_draft_tokens() -> None:
    accepted = Answer((1, 2), ("accepted", "correction"), "length")
    plain = Answer((1, 2), ("plain", "correction"), "length")
    assert coverage.parts_without_acceptance({"greedy": [plain, accepted], "sampled": [accepted]}) == ()
    (text,) = coverage.parts_without_acceptance({"greedy": [plain, accepted], "sampled": [plain]})
    assert "no draft token was accepted in the sampled answers" in text


def test_samples_without_drafts_show_nothing(pair: tuple[Path, Path], prompts: Path, tmp_path: Path) -> None:
    """Drafts the first tokens of the eight prompts; then the batch is too large to draft."""
    seldom = {**drafted(pair, rejection_sample_method="standard"), "disable_by_batch_size": 2}
    status, report = run([*options(pair, prompts, seldom), "--samples", "100"], tmp_path / "report.json")
    assert status == 1
    assert report["verdict"].startswith("NOT SHOWN: no draft token was accepted in the sampled answers")
    few = drafted(pair, rejection_sample_method="standard")
    hidden = [*options(pair, prompts, few), "--samples", "100", "--temperature", "50"]
    status, report = run(hidden, tmp_path / "report.json")
    assert (status, report["greedy"]["passed"], report["with_speculation"]["accepted"] > 0) == (1, True, True)
    assert not any(test["freedom"] for test in report["law"]["tests"])
    assert report["verdict"].startswith("NOT SHOWN: no prefix has enough tokens from rounds with a draft")


# Arguments.


@pytest.mark.parametrize(
    ("speculative", "more", "message"),
    [
        (None, [], "asks for no speculation"),
        (
            {**NGRAM, "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5, 0.25]},
            [],
            "'synthetic' changes answers on purpose",
        ),
        (NGRAM, ["--prompts", "/nowhere"], "cannot read /nowhere"),
        (NGRAM, ["--json", "/nowhere/report.json"], "there is no folder /nowhere"),
        (NGRAM, ["--model", "other"], "given twice"),
    ],
)
def test_refusals(
    pair: tuple[Path, Path], prompts: Path, speculative: dict[str, Any] | None, more: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        cli.app([*options(pair, prompts, speculative), *more], standalone_mode=False)


def test_prompts_of_a_file_or_the_demos_own(tmp_path: Path) -> None:
    text, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    text.write_text("one\n\ntwo\nthree\n")
    lines.write_text('"one"\n{"prompt": "two", "temperature": 3}\n{"prompt_token_ids": [4, 5]}\n')
    assert cli_check.read_prompts(text, 2) == ["one", "two"]
    assert cli_check.read_prompts(lines, 9) == [{"prompt": "one"}, {"prompt": "two"}, {"prompt_token_ids": [4, 5]}]
    assert len(cli_check.read_prompts(None, 100)) == 20
    text.write_text("\n")
    with pytest.raises(ConfigError, match="has no prompts"):
        cli_check.read_prompts(text, 2)


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\u0085", "\f", "\r"])
def test_a_line_ends_only_with_a_line_feed(tmp_path: Path, character: str) -> None:
    text, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    said = f"one{character}two"
    text.write_text(f"{said}\nthree\r\n", encoding="utf-8-sig", newline="")
    lines.write_text(f"{json.dumps(said, ensure_ascii=False)}\r\n  \n", encoding="utf-8-sig", newline="")
    assert cli_check.read_prompts(text, 2) == [said, "three"]
    assert cli_check.read_prompts(lines, 2) == [{"prompt": said}]


def test_the_command_passes(pair: tuple[Path, Path], prompts: Path, tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    done = slipstream(*options(pair, prompts, NGRAM), "--num-prompts", "3", "--json", str(output), timeout_s=3000)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("passed: speculation changes nothing\n")
    assert json.loads(output.read_text())["passed"]


@pytest.mark.full
@pytest.mark.timeout(0)
@pytest.mark.parametrize("rule", ["coupled", "standard", "block"])
def test_the_demo_pair_passes(tmp_path: Path, rule: str) -> None:
    output = tmp_path / "report.json"
    speculative = json.dumps({"rejection_sample_method": rule})
    done = slipstream("check", "--speculative-config", speculative, "--json", str(output), timeout_s=3000)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(output.read_text())["passed"]
