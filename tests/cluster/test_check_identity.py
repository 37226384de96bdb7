"""The comparison of answers: first differences, gaps under the same noise, ties, common traits of violations."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.check import identity
from cluster.check.answers import Answer, AnswerBuilder, Origin, Place, origins_of, places_of
from cluster.check.identity import ALLOWANCES, NO_TIES, Allowance, ComparedRequest, Difference, Finding
from protos.messages import Step, TokenOutput
from protos.seeds import INCREMENT, MASK, mix

Floats = npt.NDArray[np.float64]
VOCAB = 30
FP32 = ALLOWANCES["float32"]
GREEDY = ComparedRequest("greedy", 3, (7, 8, 9), 0.0, 0)
SEEDED = ComparedRequest("seeded", 3, (7, 8, 9), 0.7, 2**63 + 7)


def answer(*token_ids: int, finish_reason: str = "length", origin: Origin = "plain") -> Answer:
    return Answer(token_ids, (origin,) * len(token_ids), finish_reason)


def logprobs(seed: int = 0) -> Floats:
    logits = np.random.default_rng(seed).normal(0, 2, VOCAB)
    return logits - np.log(np.exp(logits).sum())


def noise(seed: int, index: int, token: int) -> float:
    """Return the Gumbel noise of (seed, index, token) by definition, in Python integers."""
    key = mix((mix((seed + INCREMENT) & MASK) + index * INCREMENT) & MASK)
    uniform = ((mix((key + (token + 1) * INCREMENT) & MASK) >> 12) + 0.5) / 2**52
    return float(-np.log(-np.log1p(-uniform)))


def perturbed(compared: ComparedRequest, index: int, logprobs_V: Floats) -> Floats:
    if not compared.temperature:
        return logprobs_V
    return logprobs_V / compared.temperature + np.array([noise(compared.seed, index, token) for token in range(VOCAB)])


def at(
    compared: ComparedRequest, with_token: int, without_token: int, origin: Origin | None = "accepted"
) -> Difference:
    """A difference at the third token of an answer: index 5 of prompt + output."""
    return Difference(compared, 2, with_token, without_token, origin, (*compared.token_ids, 4, 4))


# Origins of tokens.


@pytest.mark.parametrize(
    ("step", "origins"),
    [
        (None, ["plain"]),
        (Step(), ["plain"]),
        (Step(proposed=3, accepted=0, depth=3), ["correction"]),
        (Step(proposed=3, accepted=2, depth=3), ["accepted", "accepted", "correction"]),
        (Step(proposed=3, accepted=3, depth=3), ["accepted", "accepted", "accepted", "bonus"]),
        (Step(proposed=6, accepted=2, depth=2), ["accepted", "accepted", "bonus"]),
    ],
)
def test_origins_of_a_step(step: Step | None, origins: list[Origin]) -> None:
    assert origins_of(len(origins), step) == origins


def test_tokens_after_the_end_of_an_answer_have_no_origin() -> None:
    assert origins_of(2, Step(proposed=3, accepted=3, depth=3)) == ["accepted", "accepted"]


@pytest.mark.parametrize(
    ("origins", "places"),
    [
        ([], []),
        (["plain", "plain"], ["prompt", "plain"]),
        (["correction", "accepted", "correction", "plain"], ["prompt", "correction", "guess", "correction"]),
        (["accepted", "accepted", "bonus", "accepted", "bonus"], ["prompt", "guess", "draft", "bonus", "draft"]),
    ],
)
def test_places_follow_from_origins(origins: list[Origin], places: list[Place]) -> None:
    assert places_of(origins) == places


def test_an_answer_grows_step_by_step_and_notes_trees() -> None:
    builder = AnswerBuilder()
    builder.add(TokenOutput("0", (1, 2), step=Step(2, 1, 2)))
    assert builder.build("length") == Answer((1, 2), ("accepted", "correction"), "length", num_steps=1)
    builder.add(TokenOutput("0", (3,), step=Step(5, 0, 2)))
    builder.add(TokenOutput("0", finish_reason="stop"))
    answer = builder.build("stop")
    assert (answer.has_tree, answer.num_steps) == (True, 2)


# Differences.


def test_the_first_difference_is_found() -> None:
    ours = [answer(1, 2, 3), answer(1, 2, 3), answer(4, 4, 5, 6, origin="bonus")]
    theirs = [answer(1, 2, 3), answer(1, 2, 3), answer(4, 4, 1, 6)]
    assert identity.differences([GREEDY, SEEDED, SEEDED], ours, theirs) == [at(SEEDED, 5, 1, "bonus")]


def test_answers_that_end_early_or_otherwise_differ() -> None:
    compared = [GREEDY] * 3
    theirs = [answer(4, 4, 5), answer(4, 4), answer(4, 4)]
    ours = [answer(4, 4), answer(4, 4, 5), answer(4, 4, finish_reason="the logits are not finite")]
    found = identity.differences(compared, ours, theirs)
    assert found == [at(GREEDY, -1, 5, None), at(GREEDY, 5, -1, "plain"), at(GREEDY, -1, -1, None)]
    for difference in found:
        finding = identity.explain(difference, logprobs(), FP32)
        assert not finding.is_tie
        assert finding.shortfall == float("inf")


# Gaps.


@pytest.mark.parametrize("compared", [GREEDY, SEEDED])
def test_gaps_are_those_of_the_definition(compared: ComparedRequest) -> None:
    score_V = perturbed(compared, 5, logprobs())
    order = np.argsort(-score_V)
    finding = identity.explain(at(compared, int(order[4]), int(order[0])), logprobs(), FP32)
    assert finding.gap == pytest.approx(score_V[order[0]] - score_V[order[1]])
    assert finding.shortfall == pytest.approx(score_V[order[0]] - score_V[order[4]])
    probs_V = np.exp(logprobs() / (compared.temperature or 1.0))
    assert finding.probability == pytest.approx(probs_V[order[4]] / probs_V.sum())
    assert finding.rank == 1 + np.flatnonzero(np.argsort(-logprobs()) == order[4])[0]
    assert (finding.prompt, finding.position, finding.origin, finding.is_tie) == (
        3,
        2,
        "an accepted draft token",
        False,
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**64 - 1), st.floats(0.2, 3.0), st.floats(0.0, 2e-4), st.booleans())
def test_a_tie_is_what_lies_within_the_gap(seed: int, temperature: float, gap: float, sampled: bool) -> None:
    """Raise the runner-up to *gap* below the best, with and without noise."""
    compared = ComparedRequest("seeded", 0, (7, 8, 9), temperature if sampled else 0.0, seed)
    logprobs_V = logprobs(1)
    score_V = perturbed(compared, 5, logprobs_V)
    best, second = (int(token) for token in np.argsort(-score_V)[:2])
    logprobs_V[second] += (score_V[best] - gap - score_V[second]) * (temperature if sampled else 1.0)
    for pair in ((best, second), (second, best)):
        finding = identity.explain(at(compared, *pair), logprobs_V, FP32)
        assert finding.shortfall == pytest.approx(gap, abs=1e-9)
        assert finding.is_tie == (finding.shortfall < 1e-4)
    third = int(np.argsort(-score_V)[2])
    assert not identity.explain(at(compared, third, best), logprobs_V, FP32).is_tie


def test_rounding_to_half_precision_is_that_of_logits() -> None:
    """The gap is one of logits over temperature, so temperature scales the gap in logits."""
    bf16 = ALLOWANCES["bfloat16"]
    assert [bf16.gap_at(temperature) for temperature in (0.0, 0.5, 1.0, 2.0)] == [0.2, 0.4, 0.2, 0.1]
    assert [FP32.gap_at(temperature) for temperature in (0.0, 0.5, 1.0, 2.0)] == [1e-4] * 4
    assert [bf16.tolerance_at(temperature) for temperature in (0.01, 0.5, 1.0)] == [0.5, 0.1, 0.05]
    logprobs_V = logprobs()
    score_V = perturbed(SEEDED, 5, logprobs_V)
    best, second = (int(token) for token in np.argsort(-score_V)[:2])
    logprobs_V[second] += (score_V[best] - 0.25 - score_V[second]) * SEEDED.temperature
    assert identity.explain(at(SEEDED, second, best), logprobs_V, bf16).is_tie, (
        "0.25 at temperature 0.7 is 0.175 in logits"
    )
    assert not identity.explain(at(SEEDED, second, best), logprobs_V, ALLOWANCES["float16"]).is_tie


def test_no_tie_is_allowed_where_bits_are_promised() -> None:
    logprobs_V = logprobs()
    logprobs_V[4] = logprobs_V[9] = logprobs_V.max() + 1
    assert identity.explain(at(GREEDY, 9, 4), logprobs_V, FP32).is_tie
    assert not identity.explain(at(GREEDY, 9, 4), logprobs_V, NO_TIES).is_tie


@pytest.mark.parametrize(
    ("allowance", "sequences", "most"),
    [(FP32, 20, 1), (FP32, 1000, 2), (FP32, 2600, 5), (ALLOWANCES["bfloat16"], 20, None), (NO_TIES, 5000, 0)],
)
def test_how_many_ties_may_be(allowance: Allowance, sequences: int, most: int | None) -> None:
    assert allowance.most_ties(sequences) == most


# Verdicts.


def finding(
    position: int = 0,
    *,
    origin: str = "an accepted draft token",
    is_tie: bool = False,
    chosen_with: tuple[str, ...] = (),
) -> Finding:
    return Finding("seeded", 0, position, 1, 2, origin, 1e-5, 1e-5 if is_tie else 0.3, 0.1, 2, chosen_with, is_tie)


def test_a_tie_passes_and_a_second_is_one_too_many() -> None:
    answers = [answer(1, 2)] * 10
    one = identity.verdict_of("seeded", answers, [finding(is_tie=True)], FP32)
    assert (one.passed, one.identical, one.ties, one.violations, one.tokens, one.explanation) == (True, 9, 1, 0, 20, "")
    assert not identity.verdict_of("seeded", answers, [finding(is_tie=True)] * 2, FP32).passed
    assert identity.verdict_of("seeded", answers, [finding(is_tie=True)] * 9, ALLOWANCES["bfloat16"]).passed
    assert not identity.verdict_of("seeded", answers, [finding()], ALLOWANCES["bfloat16"]).passed
    assert identity.verdict_of("greedy", answers, [], FP32).passed


def test_violations_are_explained_by_what_they_share() -> None:
    answers = [answer(1, 2)] * 10
    found = [finding(), finding(), finding(origin="a bonus token"), finding(is_tie=True)]
    text = identity.verdict_of("seeded", answers, found, FP32).explanation
    assert text == (
        "no tie: 2 of 3 first differences are an accepted draft token: "
        "draft tokens were accepted that are not the target's choice"
    )
    before = "with the noise of the position before"
    text = identity.verdict_of("seeded", answers, [finding(chosen_with=(before,))] * 3 + [finding()], FP32).explanation
    assert text.endswith(f"; 3 of 4 are what the target chooses {before}: an index is off by one")
    assert (
        "off by one"
        not in identity.verdict_of("seeded", answers, [finding(chosen_with=(before,)), finding()], FP32).explanation
    )


def test_the_noise_of_a_neighbour_is_recognised() -> None:
    logprobs_V = logprobs() / 4
    by_index = {index: int(perturbed(SEEDED, index, logprobs_V).argmax()) for index in (4, 5, 6)}
    assert len({*by_index.values(), int(logprobs_V.argmax())}) == 4, "the seed was chosen so that they differ"
    for index, way in ((4, "with the noise of the position before"), (6, "with the noise of the position after")):
        found = identity.explain(at(SEEDED, by_index[index], by_index[5]), logprobs_V, FP32)
        assert found.chosen_with == (way,)
    found = identity.explain(at(SEEDED, int(logprobs_V.argmax()), by_index[5]), logprobs_V, FP32)
    assert "without noise" in found.chosen_with
