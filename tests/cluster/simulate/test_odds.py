"""The odds of draft tokens of sampled answers, against sums over all drafts and against drawn noise."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import demo
from cluster.cli import main as cli
from cluster.simulate.odds import ExpectedAcceptance, Floats, Odds, share_drafted, target_probs
from protos.draft import Draft
from protos.errors import ConfigError
from protos.messages import Sampling

P, Q = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.2, 0.6, 0.0, 0.2])
PLAIN = Sampling(seed=0)
MODEL = ["--model", str(demo.pair()[0]), "--max-model-len", "64", "--enforce-eager"]


def logs(p_V: Floats) -> dict[int, float]:
    return {token: float(np.log(p)) for token, p in enumerate(p_V)}


def test_under_standard_the_shares_add_up_to_the_overlap() -> None:
    total = sum(p * share_drafted("standard", P, Q, token) for token, p in enumerate(P))
    assert total == pytest.approx(np.minimum(P, Q).sum())


def test_under_coupled_a_share_is_how_often_the_same_noise_gives_the_draft_the_same_token() -> None:
    noise_NV = np.random.default_rng(0).gumbel(size=(200_000, 4))
    with np.errstate(divide="ignore"):
        target_N, draft_N = ((np.log(probs) + noise_NV).argmax(1) for probs in (P, Q))
    for token in range(4):
        drawn_N = draft_N[target_N == token] == token
        error = 5 * np.sqrt(0.25 / len(drawn_N))
        assert share_drafted("coupled", P, Q, token) == pytest.approx(drawn_N.mean(), abs=error)


def test_where_draft_and_target_agree_every_token_is_accepted() -> None:
    for rule in ("coupled", "standard"):
        assert [share_drafted(rule, P, P, token) for token in range(4)] == pytest.approx([1.0] * 4)


def test_what_is_not_logged_shares_what_is_left() -> None:
    known = {0: float(np.log(0.5)), 1: float(np.log(0.3))}
    assert target_probs(known, 4, PLAIN) == pytest.approx([0.5, 0.3, 0.1, 0.1], abs=1e-6)
    assert target_probs(known, 4, PLAIN, np.array([0.7, 0.0, 0.3, 0.1])) == pytest.approx(
        [0.5, 0.3, 0.15, 0.05], abs=1e-6
    )


def test_temperature_and_limits_are_those_of_the_request() -> None:
    squared = P**2 / (P**2).sum()
    assert target_probs(logs(P), 4, Sampling(seed=0, temperature=0.5)) == pytest.approx(squared, abs=1e-6)
    assert target_probs(logs(P), 4, Sampling(seed=0, top_k=2)) == pytest.approx([0.625, 0.375, 0, 0], abs=1e-6)


def test_a_learned_draft_is_fed_the_logged_tokens_and_expected_by_the_product_of_their_shares() -> None:
    odds = Odds([1, 0], [logs(P), logs(P)], 4, "standard", 0)
    assert [odds.feed(Q, Q, place, place, PLAIN) for place in range(3)] == [1, 0, None]
    accepted = odds.num_accepted(Draft((1, 0, 3)), 0, PLAIN)
    assert accepted in (1, 2)  # q > p for the first
    assert odds.expected == ExpectedAcceptance(1, pytest.approx((1.0, 0.4, 0.0)))  # type: ignore[arg-type]
    assert odds.expected.length == pytest.approx(2.4)


def test_how_many_are_accepted_is_drawn_with_these_shares() -> None:
    odds, counts = Odds([0], [logs(P)], 4, "standard", 0), []
    for _ in range(4_000):
        odds.feed(Q, Q, 0, 0, PLAIN)
        counts.append(odds.num_accepted(Draft((0,)), 0, PLAIN))
    assert np.mean(counts) == pytest.approx(0.4, abs=5 * np.sqrt(0.24 / 4_000))


def test_a_draft_that_needs_no_noise_is_accepted_where_it_matches_and_expected_by_the_target() -> None:
    odds = Odds([1, 0, 2], [logs(P)] * 3, 4, "coupled", 0)
    assert odds.num_accepted(Draft((1, 2, 2)), 0, PLAIN) == 1
    assert odds.expected.by_depth == pytest.approx((0.3, 0.15, 0.0), abs=1e-6)  # after a miss nothing is known
    assert odds.num_accepted(Draft(()), 2, PLAIN) == 0
    assert odds.expected.num_steps == 1


# The command


def simulate(path: Path, *given: str, draft: dict[str, Any]) -> None:
    cli.app(["simulate", str(path), *MODEL, "--draft", json.dumps(draft), *given], standalone_mode=False)


def line(**changed: Any) -> dict[str, Any]:
    """A sampled answer, without a seed, whose tokens had probabilities of 0.5, 0.25 and 1 each."""
    tops = [{"7": -0.6931, "9": -0.7}, {"8": -1.3863}, {"5": 0.0}]
    answer = {"prompt": [1, 5, 6, 7, 8, 5, 6], "output": [7, 8, 5], "temperature": 1.0, "logprobs": tops}
    return {**answer, **changed}


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    return path


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 2}
TINY = {"model": str(demo.pair()[1]), "num_speculative_tokens": 2}


def test_the_expectation_is_shown_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    simulate(write(tmp_path / "log.jsonl", line()), "--json", str(figures), draft=NGRAM)
    shown = capsys.readouterr()
    assert "do not say how they were sampled" not in shown.err  # the temperature is next to the answer
    assert "expected by the logged probabilities, 1 answers: 2.75 tokens per step; 50%, 25%, 100%" in shown.out
    [found] = json.loads(figures.read_text())["replays"]
    assert found["expected_acceptance_length"] == pytest.approx(2.75, abs=1e-3)


@pytest.mark.parametrize("rule", ["coupled", "standard"])
def test_a_learned_draft_of_answers_without_a_seed(
    rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate(write(tmp_path / "log.jsonl", line()), draft={**TINY, "rejection_sample_method": rule})
    shown = capsys.readouterr().out
    assert "1 answers: sampled: accepted with the probabilities that the logged ones of the target and" in shown
    assert "expected by the logged probabilities" in shown


def test_penalties_change_what_was_logged_so_nothing_is_expected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"temperature": 1.0, "presence_penalty": 1.0}
    simulate(write(tmp_path / "log.jsonl", line(sampling=settings)), draft=NGRAM)
    assert "expected by" not in capsys.readouterr().out


def test_temperature_of_logs_that_do_not_state_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "log.jsonl", line(temperature=None))
    simulate(path, "--temperature", "1", "--logprobs-field", "logprobs", draft=NGRAM)
    shown = capsys.readouterr()
    assert "expected by the logged probabilities" in shown.out
    assert "do not say how they were sampled" not in shown.err


@pytest.mark.parametrize(
    ("logprobs", "says"),
    [
        ("x", ":1: log-probabilities must be a list with an object of numbers up to 0 by token id for each output"),
        ([{"7": 0.5}] * 3, ":1: log-probabilities must be"),
        ([{"the": -0.5}] * 3, ":1: log-probabilities must be"),
        ([{"7": "NaN"}] * 3, ":1: log-probabilities must be"),
        ([{}] * 3, ":1: log-probabilities must be"),
        ([{"7": -0.5}], ":1 has log-probabilities of 1 tokens, up to id 7, but 3 output tokens"),
        ([{"99999": -0.5}] * 3, "up to id 99999, but 3 output tokens and ids below"),
    ],
)
def test_bad_log_probabilities_are_named_by_line(tmp_path: Path, logprobs: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        path = write(tmp_path / "log.jsonl", line(logprobs=None, tops=logprobs))
        simulate(path, "--logprobs-field", "tops", draft=NGRAM)


def test_other_programs_log_probabilities_are_not_used_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate(write(tmp_path / "log.jsonl", line(logprobs={"content": []})), draft=NGRAM)
    assert "the log-probabilities of 1 answers are not a list with an object" in caplog.text
    assert "expected by" not in capsys.readouterr().out
