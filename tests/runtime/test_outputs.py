"""From step outputs to vLLM's result shapes."""

import math
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.messages import Request, Sampling, SpeculationStats, TokenLogprobs, TokenOutput
from protos.outputs import SpeculativeDecodingMetrics, total
from protos.sampling import SamplingParams
from runtime.frontend.outputs import OutputCollector


def requests(n: int = 1, logprobs: int | None = None, prompt_logprobs: int | None = None) -> list[Request]:
    sampling = Sampling(seed=0, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
    return [Request(f"r-{j}", (1, 2, 3), SamplingParams(n=n), sampling, max_tokens=9) for j in range(n)]


def test_deltas_add_up() -> None:
    collector = OutputCollector("r", "abc", requests())
    collector.add(TokenOutput("r-0", [5, 6], "ab", num_cached_tokens=2))
    early = collector.result()
    assert (early.finished, early.outputs[0].text, early.outputs[0].finish_reason) == (False, "ab", None)
    assert early.metrics.speculative_decoding is None
    stats = SpeculationStats(steps=2, proposed=6, accepted=3, accepted_per_pos=(2, 1, 0))
    collector.add(TokenOutput("r-0", [7], "c", finish_reason="stop", stop_reason=7, speculation=stats))
    result = collector.result()
    output = result.outputs[0]
    assert (result.request_id, result.prompt, result.prompt_token_ids) == ("r", "abc", [1, 2, 3])
    assert (output.text, output.token_ids, output.finish_reason, output.stop_reason) == ("abc", [5, 6, 7], "stop", 7)
    assert (output.logprobs, output.cumulative_logprob, result.prompt_logprobs) == (None, None, None)
    assert (result.finished, result.num_cached_tokens, output.finished()) == (True, 2, True)
    assert result.metrics.num_generation_tokens == 3
    assert result.metrics.arrival_time <= result.metrics.first_token_time <= result.metrics.finished_time  # type: ignore[operator]
    assert result.speculation == output.speculation
    assert output.speculation is not None
    assert output.speculation.mean_acceptance_length == 2.5


def test_samples_arrive_in_any_order() -> None:
    collector = OutputCollector("r", None, requests(n=2))
    collector.add(TokenOutput("r-1", [9], "y", finish_reason="length", speculation=SpeculationStats(1, 2, 1, (1, 0))))
    assert not collector.finished
    collector.add(TokenOutput("r-0", [8], "x", finish_reason="stop", speculation=SpeculationStats(1, 1, 1, (1,))))
    result = collector.result()
    assert [(o.index, o.text, o.finish_reason) for o in result.outputs] == [(0, "x", "stop"), (1, "y", "length")]
    assert result.speculation is not None
    assert (result.speculation.num_spec_steps, result.speculation.num_draft_tokens) == (2, 3)
    assert result.speculation.acceptance_per_position == [1.0, 0.0]


def test_logprobs_in_vllm_shape() -> None:
    collector = OutputCollector("r", None, requests(logprobs=2, prompt_logprobs=1), lambda i: f"<{i}>")
    prompt = [TokenLogprobs([2, 4], [-3.0, -0.1], [5, 1]), TokenLogprobs([3, 3], [-0.2, -0.2], [1, 1])]
    collector.add(TokenOutput("r-0", prompt_logprobs=prompt[:1]))
    chosen_third = TokenLogprobs([7, 5, 6], [-2.0, -0.5, -1.0], [3, 1, 2])
    collector.add(TokenOutput("r-0", [7], prompt_logprobs=prompt[1:], logprobs=[chosen_third]))
    chosen_first = TokenLogprobs([5, 5, 6], [-0.5, -0.5, -1.0], [1, 1, 2])
    collector.add(TokenOutput("r-0", [5], logprobs=[chosen_first], finish_reason="length"))
    result = collector.result()
    first, second = result.outputs[0].logprobs or []
    assert list(first) == [7, 5, 6]
    assert (first[7].logprob, first[7].rank, first[7].decoded_token) == (-2.0, 3, "<7>")
    assert list(second) == [5, 6]
    assert math.isclose(result.outputs[0].cumulative_logprob or 0.0, -2.5)
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == len(result.prompt_token_ids)
    assert result.prompt_logprobs[0] is None
    assert list(result.prompt_logprobs[1] or ()) == [2, 4]
    assert list(result.prompt_logprobs[2] or ()) == [3]


def test_a_failed_sample_says_why_and_leaves_the_others() -> None:
    collector = OutputCollector("r", None, requests(n=2))
    collector.add(TokenOutput("r-0", finish_reason="error", error="its logits were NaN"))
    collector.add(TokenOutput("r-1", [4], "x", finish_reason="stop"))
    failed, whole = collector.result().outputs
    assert (failed.finish_reason, failed.stop_reason) == ("error", "its logits were NaN")
    assert (whole.finish_reason, whole.stop_reason, whole.text) == ("stop", None, "x")


def rounds() -> st.SearchStrategy[list[tuple[int, int]]]:
    """Lists of (proposed, accepted)."""
    return st.lists(st.integers(1, 6).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k))), max_size=30)


def stats_of(played: list[tuple[int, int]]) -> SpeculationStats:
    width = max((proposed for proposed, _ in played), default=0)
    per_pos = tuple(sum(accepted > j for _, accepted in played) for j in range(width))
    return SpeculationStats(len(played), sum(p for p, _ in played), sum(a for _, a in played), per_pos)


@given(rounds())
def test_figures_follow_their_definitions(played: list[tuple[int, int]]) -> None:
    figures = SpeculativeDecodingMetrics.of(stats_of(played))
    if not played:
        assert figures == SpeculativeDecodingMetrics()
        return
    accepted = [count for _, count in played]
    width = max(proposed for proposed, _ in played)
    assert figures.acceptance_histogram == [accepted.count(j) for j in range(width + 1)]
    assert figures.mean_acceptance_length == pytest.approx(1 + sum(accepted) / len(played))
    assert figures.draft_acceptance_rate == pytest.approx(sum(accepted) / sum(p for p, _ in played))
    assert (figures.num_spec_steps, figures.num_spec_tokens) == (len(played), width)
    assert figures.counts() == stats_of(played)


@given(st.lists(rounds(), max_size=4))
def test_totals_are_those_of_all_rounds(played: list[list[tuple[int, int]]]) -> None:
    def all_rounds() -> Iterator[tuple[int, int]]:
        for one in played:
            yield from one

    assert total([stats_of(one) for one in played] + [None]) == stats_of(list(all_rounds()))
