"""Overrides of speculation by a request: fewer draft tokens, one method, none."""

from collections.abc import Sequence

import pytest

from protos.config.engine import CacheConfig, SchedulerConfig, SpeculativeConfig
from protos.draft import Draft, DraftRow
from protos.errors import InvalidRequestError
from protos.interfaces import Proposer
from protos.messages import Request, WorkerInfo
from runtime.core.scheduler import Scheduler
from runtime.frontend.speculation_override import SpeculationOverride, apply_override
from runtime.policy.batch_size import BatchSizePolicy
from tests.support.distributed.fake_worker import make_request

LOADED = WorkerInfo(32, 4, 64, 10, methods=("ngram", "suffix", "draft_model"), num_speculative_tokens=4)
PLAIN = WorkerInfo(32, 4, 64, 10)


class Always:
    """Proposes the same token repeatedly."""

    on_worker = False

    def __init__(self, token: int) -> None:
        self.token = token

    @classmethod
    def create(cls, config: SpeculativeConfig, runner: object) -> Proposer:
        raise NotImplementedError

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return [Draft((self.token,) * row.k) for row in rows]


def asked(wish: SpeculationOverride, info: WorkerInfo = LOADED) -> Request:
    (request,) = apply_override([make_request("a", [1, 2, 3])], wish, info)
    return request


def planned(request: Request, info: WorkerInfo = LOADED, *, k: int = 4) -> tuple[int, tuple[int, ...] | None]:
    """Return K and the draft of the request's first round, with `ngram` proposing 7 and `suffix` 8."""
    scheduler = Scheduler(SchedulerConfig(), CacheConfig(), info, proposers=[Always(7), Always(8)])
    scheduler.admit([request])
    config = SpeculativeConfig(method=("ngram", "suffix", "draft_model"), num_speculative_tokens=k)
    (row,) = scheduler.schedule(BatchSizePolicy(config)).rows
    return row.k, None if row.draft is None else row.draft.tokens


def test_a_request_without_a_wish_gets_what_is_configured() -> None:
    assert planned(asked(SpeculationOverride())) == (4, (7, 7, 7, 7))


def test_fewer_draft_tokens_and_never_more_than_this_step_has() -> None:
    assert planned(asked(SpeculationOverride(num_speculative_tokens=2))) == (2, (7, 7))
    assert planned(asked(SpeculationOverride(num_speculative_tokens=4)), k=3) == (3, (7, 7, 7))


@pytest.mark.parametrize(
    ("method", "draft"), [("ngram", (7, 7, 7, 7)), ("suffix", (8, 8, 8, 8)), ("draft_model", None)]
)
def test_one_method_of_a_cascade(method: str, draft: tuple[int, ...] | None) -> None:
    assert planned(asked(SpeculationOverride(method=method))) == (4, draft)


def test_a_method_beside_the_controller_leaves_nothing_to_the_worker() -> None:
    silent = Scheduler(SchedulerConfig(), CacheConfig(), LOADED, proposers=[Silent(), Always(8)])
    silent.admit([asked(SpeculationOverride(method="ngram"))])
    config = SpeculativeConfig(method=("ngram", "suffix", "draft_model"), num_speculative_tokens=4)
    (row,) = silent.schedule(BatchSizePolicy(config)).rows
    assert (row.k, row.draft) == (0, None)


class Silent(Always):
    """Never proposes a token."""

    def __init__(self) -> None:
        super().__init__(0)

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return [Draft(()) for _ in rows]


def test_no_draft_tokens() -> None:
    assert planned(asked(SpeculationOverride(enabled=False))) == (0, None)
    assert asked(SpeculationOverride(), PLAIN).speculate
    assert not asked(SpeculationOverride(enabled=False), PLAIN).speculate


@pytest.mark.parametrize(
    ("wish", "info", "words"),
    [
        (SpeculationOverride(num_speculative_tokens=5), LOADED, "num_speculative_tokens must be at most 4.*got 5"),
        (SpeculationOverride(num_speculative_tokens=0), LOADED, "must be at least 1, got 0; enabled: false"),
        (
            SpeculationOverride(method="eagle"),
            LOADED,
            r"one of those loaded \(ngram, suffix, draft_model\), got 'eagle'",
        ),
        (SpeculationOverride(num_speculative_tokens=1), PLAIN, "runs without speculation"),
        (SpeculationOverride(method="ngram"), PLAIN, "runs without speculation"),
    ],
)
def test_more_than_is_loaded_is_refused_with_both_numbers(
    wish: SpeculationOverride, info: WorkerInfo, words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words) as refused:
        asked(wish, info)
    assert refused.value.param == "speculative_config"
