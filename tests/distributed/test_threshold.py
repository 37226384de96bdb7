"""The batch-size threshold: a ramp of requests up and down switches speculation once each way."""

import threading
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import pytest

from cluster import assemble
from protos.messages import Abort, Request, Sampling
from protos.sampling import SamplingParams
from runtime.core.controller import LocalInbox
from runtime.core.sequence import Sequence
from runtime.policy.batch_size import RESUME_STEPS
from tests.support.distributed.engine import Engine, K, Models, assert_same, configure, quick_turns, threaded, tiny_pair
from workers.model.runner import ModelRunner

LONGEST = 160


@dataclass(frozen=True)
class Ramp:
    """Up to `top` requests at once and back to one; speculation is off above `edge`."""

    top: int
    edge: int

    @property
    def calm(self) -> int:
        """So few rows for a while turn it on again."""
        return self.edge * 4 // 5

    def arguments(self, models: Models, placement: str | None) -> dict[str, Any]:
        speculative = {
            "method": "draft_model",
            "model": str(models[1]),
            "num_speculative_tokens": K,
            "disable_by_batch_size": self.edge,
            **({"placement": placement} if placement else {}),
        }
        return {"speculative_config": speculative, **self.room}

    @property
    def room(self) -> dict[str, Any]:
        return {
            "max_num_seqs": self.top,
            "max_num_batched_tokens": 64 + self.top * (K + 1),
            "max_model_len": 200,
            "num_gpu_blocks_override": 60 * self.top,
        }


RAMPS = [
    pytest.param(Ramp(top=12, edge=5), id="up to 12"),
    pytest.param(Ramp(top=64, edge=16), id="up to 64", marks=pytest.mark.full),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return tiny_pair(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def _quick_turns() -> Iterator[None]:
    with quick_turns():
        yield


def requests(ramp: Ramp) -> list[Request]:
    """Return one request per step up, every other one sampled; none ends during the ramp."""
    return [
        Request(str(i), (3, 4, 5 + i % 80, 6 + i % 7), SamplingParams(), Sampling(i, float(i % 2)), LONGEST)
        for i in range(ramp.top)
    ]


@dataclass
class Counted:
    """The number of rows in each round, as passed to the policy."""

    engine: Engine
    decoding: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        policy = self.engine.built.controller.policy
        inner = policy.begin_step

        def begin_step(running: Seq[Sequence]) -> None:
            self.decoding.append(sum(sequence.is_decoding for sequence in running))
            inner(running)

        policy.begin_step = begin_step  # type: ignore[method-assign]

    def climb_and_descend(self, ramp: Ramp) -> dict[str, list[int]]:
        """Add one request per step up to the top, then abort one every second step down to one."""
        for request in requests(ramp):
            self.engine.put(request)
            self.engine.step()
        self.engine.step()
        for i in range(ramp.top - 1):
            self.engine.put(Abort((str(i),)))
            self.engine.step()
            self.engine.step()
        return self.engine.finish()

    def guessing(self) -> list[bool]:
        return [any(row.k for row in plan.rows) for plan, _ in self.engine.rounds]

    def span_off(self) -> range:
        """The rounds without draft tokens."""
        guessing = self.guessing()
        first = next(i for i in range(1, len(guessing)) if guessing[i - 1] and not guessing[i])
        return range(first, next(i for i in range(first, len(guessing)) if guessing[i]))

    def assert_one_switch_each_way(self, ramp: Ramp) -> None:
        assert len(self.decoding) == len(self.engine.rounds)
        assert max(self.decoding) == ramp.top
        off = self.span_off()
        assert self.decoding[off.start - 1] == ramp.edge
        assert self.decoding[off.start] == ramp.edge + 1
        calm = [rows <= ramp.calm for rows in self.decoding[off.start : off.stop + 1]]
        assert calm.count(True) == RESUME_STEPS
        assert all(calm[-RESUME_STEPS:]), "speculation must resume in the sixteenth calm step"
        guessing = self.guessing()
        assert all(guessing[1 : off.start])
        assert all(guessing[off.stop : -1])  # one token may be left for the last round
        changes = self.engine.built.controller.stats().speculation_changes
        assert changes == {"batch_size_rose": 1, "batch_size_fell": 1}


def alone(models: Models, arguments: dict[str, Any], *, draft: bool = True) -> Engine:
    """An engine in this thread."""
    return Engine(assemble.build(configure(models, draft=draft, **arguments), LocalInbox(), report=lambda line: None))


def plain(models: Models, ramp: Ramp) -> dict[str, list[int]]:
    """Return the outputs of the same requests without speculation."""
    engine = alone(models, ramp.room, draft=False)
    engine.put(*requests(ramp))
    outputs = engine.finish()
    assert engine.proposed() == 0
    return outputs


def check(engine: Engine, models: Models, ramp: Ramp) -> Counted:
    counted = Counted(engine)
    outputs = counted.climb_and_descend(ramp)
    counted.assert_one_switch_each_way(ramp)
    assert_same(outputs, plain(models, ramp))
    assert engine.proposed(0, counted.span_off().start) > 0
    assert engine.proposed(counted.span_off().stop) > 0
    assert engine.proposed() > engine.accepted > 0
    return counted


def assert_no_look_ahead(engine: Engine, off: range) -> None:
    """Check that without speculation rows get blocks for known tokens only."""
    held: dict[int, int] = {}
    for index, (plan, _) in enumerate(engine.rounds):
        held.update({new.slot: 0 for new in plan.new})
        for row in plan.rows:
            held[row.slot] += len(row.new_block_ids)
            if index in off and row.new_block_ids:
                assert held[row.slot] == -(-(row.start + row.length) // engine.built.info.block_size)


@pytest.mark.parametrize("ramp", RAMPS)
def test_a_ramp_in_one_process(models: Models, ramp: Ramp) -> None:
    counted = check(alone(models, ramp.arguments(models, None)), models, ramp)
    assert_no_look_ahead(counted.engine, counted.span_off())


@pytest.mark.parametrize("ramp", RAMPS)
def test_a_ramp_over_a_worker_group_leaves_the_draft_idle(
    models: Models, ramp: Ramp, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = threaded(configure(models, **ramp.arguments(models, "dedicated")), floor_s=60.0)
    worked: list[int] = []  # the current round at each forward pass of the draft
    forward = ModelRunner.forward

    def note(self: ModelRunner, *args: Any) -> Any:
        if threading.current_thread().name == "draft":
            worked.append(len(engine.rounds))
        return forward(self, *args)

    monkeypatch.setattr(ModelRunner, "forward", note)
    try:
        off = check(engine, models, ramp).span_off()
    finally:
        engine.built.shutdown()
    assert_no_look_ahead(engine, off)
    assert not any(plan.epoch for plan, _ in engine.rounds[off.start : off.stop])
    assert not engine.drafted & {plan.round for plan, _ in engine.rounds[off.start : off.stop]}
    # The draft may finish its last work during the next round.
    assert not set(worked) & set(range(off.start + 2, off.stop))
    assert min(worked) < off.start < off.stop <= max(worked)
    assert engine.missed == 0
