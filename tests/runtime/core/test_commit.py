"""Commits: how sequences grow, end and fail."""

import pytest

from protos.messages import Abort, Request, SpeculationStats, Verdict
from protos.sampling import SamplingParams
from tests.support.distributed.fake_worker import EOS, make_request
from tests.support.scheduling import OFF, fixed_k, make_scheduler, make_verdicts, started


def finish_with(tokens: list[int], request: Request) -> object:
    """Run one step that emits all *tokens*; return the output of the request."""
    scheduler = make_scheduler()
    scheduler.admit([request])
    plan = scheduler.schedule(fixed_k(len(tokens)))
    (output,) = scheduler.commit(plan, make_verdicts(plan, tokens, proposed=len(tokens)))
    return output


@pytest.mark.parametrize(
    ("options", "kept", "text", "reason", "stop_reason"),
    [
        ({}, [0, 1, EOS], "ab", "stop", None),
        ({"ignore_eos": True}, [0, 1, EOS, 2, 5], "abcx", "length", None),
        ({"stop_token_ids": [1]}, [0, 1], "a", "stop", 1),
        ({"stop_token_ids": [1], "include_stop_str_in_output": True}, [0, 1], "ab", "stop", 1),
        ({"stop": ["b"]}, [0, 1], "a", "stop", "b"),
        ({"stop": ["b"], "include_stop_str_in_output": True}, [0, 1], "ab", "stop", "b"),
        ({"stop": ["ab"], "min_tokens": 2}, [0, 1, EOS], "ab", "stop", None),
        ({"skip_special_tokens": False, "ignore_eos": True}, [0, 1, EOS, 2, 5], "ab<e>cx", "length", None),
        ({"detokenize": False}, [0, 1, EOS], "", "stop", None),
    ],
)
def test_tokens_after_the_end_exist_nowhere(
    options: dict[str, object], kept: list[int], text: str, reason: str, stop_reason: object
) -> None:
    output = finish_with([0, 1, EOS, 2, 5], make_request("a", [3, 3], max_tokens=5, params=SamplingParams(**options)))
    assert (list(output.token_ids), output.text) == (kept, text)
    assert (output.finish_reason, output.stop_reason) == (reason, stop_reason)
    assert [entry.token_ids[0] for entry in output.logprobs] == kept
    assert output.speculation.accepted == min(4, len(kept))
    assert output.speculation.proposed <= len(kept)


def test_the_cache_learns_nothing_from_after_the_end() -> None:
    scheduler = make_scheduler()
    scheduler.admit([make_request("a", [3, 3])])
    plan = scheduler.schedule(fixed_k(7))
    scheduler.commit(plan, make_verdicts(plan, [0, EOS, 1, 1, 1, 1, 1], proposed=7))
    scheduler.check_integrity()
    scheduler.admit([make_request("b", [3, 3, 0, EOS, 1, 1, 1, 1, 1, 1])])
    assert scheduler.schedule(OFF).rows[0].start == 4


def test_max_tokens_and_the_context_end_a_request() -> None:
    assert finish_with([0], make_request("a", [1], max_tokens=1)).finish_reason == "length"
    assert finish_with([0], make_request("a", [1] * 63, max_tokens=9)).finish_reason == "length"


def test_acceptance_is_counted_by_request_and_by_position() -> None:
    scheduler = started(make_request("a", [1], max_tokens=9))
    for tokens, proposed in (([2, 2, 2], 3), ([2], 3), ([EOS], 0)):
        plan = scheduler.schedule(fixed_k(3))
        (output,) = scheduler.commit(plan, make_verdicts(plan, tokens, proposed=proposed))
    assert output.speculation == SpeculationStats(2, 6, 2, (1, 1, 0))
    stats = scheduler.stats()
    assert (stats.proposed, stats.accepted, stats.accepted_per_pos, stats.drafting_rounds) == (6, 2, (1, 1, 0), 2)
    assert (stats.steps, stats.generated_tokens, stats.num_running) == (4, 6, 0)


def test_a_failed_row_ends_alone_and_its_blocks_are_not_trusted() -> None:
    scheduler = make_scheduler()
    scheduler.admit([make_request("a", [1] * 9), make_request("b", [2] * 9)])
    plan = scheduler.schedule(OFF)
    first, second = make_verdicts(plan, [0], [0])
    outputs = scheduler.commit(plan, [Verdict(first.slot, failed="its logits were NaN"), second])
    assert [(o.request_id, o.finish_reason, o.error) for o in outputs] == [
        ("a", "error", "its logits were NaN"),
        ("b", None, None),
    ]
    scheduler.admit([make_request("c", [1] * 9)])
    assert [row.start for row in scheduler.schedule(OFF).rows] == [9, 0]


def test_a_row_without_a_verdict_is_an_error_of_that_row() -> None:
    scheduler = make_scheduler()
    scheduler.admit([make_request("a", [1])])
    (output,) = scheduler.commit(scheduler.schedule(OFF), [])
    assert output.finish_reason == "error"
    assert "no verdict" in output.error


def test_aborts_free_blocks_at_once_and_are_skipped_by_a_commit_under_way() -> None:
    scheduler = started(make_request("a", [1] * 9), make_request("b", [2] * 9))
    plan = scheduler.schedule(OFF)
    (output,) = scheduler.admit([Abort(("a", "unknown"))])
    assert (output.request_id, output.finish_reason, output.text) == ("a", "abort", "")
    scheduler.check_integrity()
    assert [o.request_id for o in scheduler.commit(plan, make_verdicts(plan, [3], [4]))] == ["b"]


def test_a_row_that_skips_its_turn_is_fed_again() -> None:
    scheduler = make_scheduler()
    scheduler.admit([make_request("a", [1] * 9), make_request("b", [2] * 9)])
    skipped = scheduler.schedule(OFF)
    outputs = scheduler.commit(skipped, make_verdicts(skipped, [], [0]))
    assert [output.request_id for output in outputs] == ["b"]
    scheduler.check_integrity()
    again, other = scheduler.schedule(OFF).rows
    assert (again.start, again.length, again.known_len, again.samples) == (8, 1, 9, True)
    assert (other.start, other.length, other.known_len) == (9, 1, 10)
