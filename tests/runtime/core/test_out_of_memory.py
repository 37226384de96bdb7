"""Steps that run out of memory: smaller ones follow, nothing is lost, and one request at most ends."""

from dataclasses import dataclass, field

import pytest

from protos.capacity import FIRST_PATIENCE, MOST_PATIENCE, TokenBudget
from protos.errors import StepOutOfMemoryError, TargetOutOfMemoryError
from protos.messages import Request, RoundPlan, Verdict, WorkerInfo
from runtime.core.controller import Controller, LocalInbox
from tests.support.distributed.fake_worker import FakeWorker, make_request
from tests.support.scheduling import INFO, fixed_k, make_scheduler


def test_a_budget_halves_and_returns_slowly() -> None:
    budget = TokenBudget(64)
    budget.shrink(40)
    assert (budget.limit, budget.is_reduced) == (20, True)
    budget.count_step(0)
    for _ in range(FIRST_PATIENCE):
        assert budget.limit == 20
        budget.count_step(20)
    assert budget.limit == 22
    budget.shrink(22)
    for _ in range(2 * FIRST_PATIENCE):
        assert budget.limit == 11
        budget.count_step(11)
    assert budget.limit == 12
    for _ in range(4 * MOST_PATIENCE):
        budget.count_step(1)
    assert (budget.limit, budget.is_reduced) == (64, False)
    budget.shrink(1)
    assert budget.limit == 1
    pausing = TokenBudget(64, least=0)
    pausing.shrink(1)
    assert pausing.limit == 0
    for _ in range(FIRST_PATIENCE):
        pausing.count_step(1)
    assert pausing.limit == 1


@dataclass
class Small(FakeWorker):
    """Has memory for *room* tokens a step, and none for the sequence in slot *sick*."""

    room: int = 8
    sick: int | None = None
    shortages: list[int] = field(default_factory=list)
    num_steps: int = 0

    def __init__(self, info: WorkerInfo, num_slots: int, room: int, sick: int | None = None) -> None:
        super().__init__(info, num_slots)
        self.room, self.sick, self.shortages, self.num_steps = room, sick, [], 0

    def run(self, plan: RoundPlan) -> list[Verdict]:
        verdicts = super().run(plan)  # the workers have taken the plan when they run out of memory
        num_tokens = sum(row.length + row.k for row in plan.rows)
        self.num_steps += 1
        if num_tokens > self.room or any(row.slot == self.sick for row in plan.rows):
            self.shortages.append(num_tokens)
            raise self.shortage()
        return verdicts

    def shortage(self) -> StepOutOfMemoryError:
        return StepOutOfMemoryError("target rank 0: no memory")


class Forgetful(Small):
    """Loses its caches, too, when it runs out of memory."""

    def shortage(self) -> StepOutOfMemoryError:
        return StepOutOfMemoryError("no memory to move keys in", keeps_state=False)


class Gang(Small):
    """As a group of ranks, is built anew after one of them has run out of memory."""

    def shortage(self) -> StepOutOfMemoryError:
        return TargetOutOfMemoryError("target rank 1: no memory")

    def rebuild(self, for_s: float) -> WorkerInfo | None:
        return self.info


REQUESTS = [make_request(str(i), [1, 2, 3, 4, 5, 6, 7, i][: 8 - i], max_tokens=12) for i in range(6)]


def run(worker: FakeWorker, requests: list[Request], **options: object) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Return the tokens of each request, and the errors."""
    controller = Controller(make_scheduler(**options), fixed_k(3), worker, inbox := LocalInbox())
    inbox.put(requests)
    tokens: dict[str, list[int]] = {}
    errors: dict[str, str] = {}
    ended = 0
    while ended < len(requests):
        for output in controller.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            ended += output.finish_reason is not None
            errors |= {output.request_id: output.error} if output.error else {}
        controller.scheduler.check_integrity()
    return tokens, errors


@pytest.mark.parametrize("kind", [Small, Forgetful, Gang])
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("room", [1, 5, 30])
def test_requests_finish_with_the_same_tokens(kind: type[Small], chunked: bool, room: int) -> None:
    expected, _ = run(FakeWorker(INFO, 8), REQUESTS)
    worker = kind(INFO, 8, room)
    found, errors = run(worker, REQUESTS, enable_chunked_prefill=chunked)
    assert not errors
    assert found == expected
    assert 0 < len(worker.shortages) < max(10, worker.num_steps / 4)


def test_a_single_token_that_never_fits_ends_its_request_alone() -> None:
    expected, _ = run(FakeWorker(INFO, 8), REQUESTS)
    worker = Small(INFO, 8, 64, sick=2)
    found, errors = run(worker, REQUESTS)
    (failed,) = errors
    assert errors[failed] == "out of memory for a single token: target rank 0: no memory"
    assert {name: ids for name, ids in found.items() if name != failed} == {
        name: ids for name, ids in expected.items() if name != failed
    }
    assert worker.shortages[-1] == 1


class Passing(Small):
    """Lacks memory for the sequence in slot *sick* only twice in a row with one token."""

    def shortage(self) -> StepOutOfMemoryError:
        if self.shortages[-2:] == [1, 1]:
            self.sick = None
        return super().shortage()


def test_a_shortage_that_passes_ends_no_request() -> None:
    expected, _ = run(FakeWorker(INFO, 8), REQUESTS)
    worker = Passing(INFO, 8, 64, sick=2)
    assert run(worker, REQUESTS) == (expected, {})
    assert worker.shortages[-2:] == [1, 1]
