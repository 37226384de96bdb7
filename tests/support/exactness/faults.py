"""Many requests through the real controller and scheduler with injected faults, over models of known distributions.

Drafts come from the draft worker, and sometimes from the controller process: chains and trees of probability 1,
with duplicates and probes. Sequences are preempted at random and for want of blocks; the draft is absent
for a while, fails during a round, or restarts with an empty cache; the targets are lost during a
round; draft sizes vary by round and row, with the tokens accepted before;
prompts are found in the prefix cache.
"""

import random
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
from msgspec import structs

from protos.config.engine import CacheConfig, SchedulerConfig
from protos.draft import NO_DRAFT, Draft, DraftRow
from protos.errors import TargetLostError
from protos.interfaces import DraftService, Proposer
from protos.messages import Request, RoundPlan, Sampling, StepCosts, TokenOutput, Verdict, WorkerInfo
from protos.sampling import SamplingParams
from runtime.core.controller import Controller, LocalInbox
from runtime.core.scheduler import Scheduler
from runtime.core.sequence import Sequence
from runtime.policy.base import FinishedStep
from tests.support.exactness.engine import TableForward, World
from tests.support.exactness.statistics import Ints
from tests.support.tree_proposer import random_tree
from workers.distributed.groups import Solo
from workers.draft.engine import DraftEngine
from workers.target_rank import TargetRank, UniExecutor

NUM_SLOTS, BLOCK_SIZE, BUDGET = 12, 2, 64
PREEMPTION, DEATH, FAILURE, LOSS, BLIND = 0.2, 0.05, 0.05, 0.02, 0.15
"""Probability per step; the last one per draft of a row."""
AWAY = 3
"""Steps without a draft after it is lost."""


@dataclass
class FromThePast:
    """A `Policy`: each row's K follows from the tokens accepted in the rounds before."""

    limit: int
    current: int = 0
    step: int = 0
    least_survival: float = 0.0
    stays_plain: bool = False
    predicted_speedup: float | None = None
    changes: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)

    def begin_step(self, running: Seq[Sequence]) -> None:
        self.step += 1
        self.current = self.step % (self.limit + 1)

    def num_draft_tokens(self, sequence: Sequence, source: int | None = None) -> int:
        k = (self.current + self.accepted[sequence.request.request_id]) % (self.limit + 1)
        return k if sequence.depth > 0 else 0

    def end_step(self, step: FinishedStep) -> None: ...

    def revise(self, costs: StepCosts) -> None: ...

    def hear(self, outputs: Seq[TokenOutput]) -> None:
        for output in outputs:
            if output.step is not None:
                self.accepted[output.request_id] += output.step.accepted


@dataclass
class Beside:
    """A proposer in the controller process that drafts random tokens for some rows."""

    vocab: int
    dice: random.Random
    on_worker = False
    drafts: int = 0

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        return [self._one(row.k) if self.dice.random() < BLIND else NO_DRAFT for row in rows]

    def _one(self, k: int) -> Draft:
        self.drafts += 1
        return random_tree([], k, self.vocab, self.dice)


@dataclass
class Failing:
    """A proposer that fails at random."""

    inner: Proposer
    dice: random.Random
    failures: int = 0

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        if self.dice.random() < FAILURE:
            self.failures += 1
            raise RuntimeError("out of memory")
        return self.inner.propose(rows)


class Faulty(UniExecutor):
    """An executor that loses its draft for a while, and its targets during a round."""

    def __init__(self, whole: UniExecutor, dice: random.Random) -> None:
        assert isinstance(whole.rank.source, DraftEngine)
        self.worker = whole.rank.source.worker
        self.proposer = Failing(whole.rank.source.proposer, dice)
        super().__init__(whole.info, TargetRank(Solo(), whole.rank.worker, DraftEngine(self.worker, self.proposer)))
        self.dice, self.epoch, self.away, self.losses = dice, 1, 0, 0

    @property
    def drafting(self) -> DraftService:
        return DraftService(not self.away, self.epoch)

    def poll(self) -> None:
        if self.away:
            self.away -= 1
        elif self.dice.random() < DEATH:
            self.away = AWAY
            self.epoch += 1
            self.worker.forget()
            _clear(self.worker.forward)

    def run(self, plan: RoundPlan) -> list[Verdict]:
        assert not (self.away and any(row.k and row.draft is None for row in plan.rows))
        is_lost = self.dice.random() < LOSS
        if is_lost and self.dice.random() < 0.5:
            self._lose()
        verdicts = super().run(plan)
        if is_lost:
            self._lose()
        return verdicts

    def _lose(self) -> None:
        self.losses += 1
        self.rank.worker.slots.clear()
        self.worker.forget()
        _clear(self.worker.forward)
        _clear(self.rank.worker.runner)
        raise TargetLostError("the targets are gone")


def _clear(forward: object) -> None:
    assert isinstance(forward, TableForward)
    forward.clear()


@dataclass
class Lives:
    """The tokens of all requests, `tokens_NL`, and how often each fault happened."""

    tokens_NL: Ints
    proposed: int
    accepted: int
    preemptions: int
    prefix_hits: int
    deaths: int
    failures: int
    losses: int
    blind: int
    speculations: Counter[int]

    def assert_eventful(self) -> None:
        """Check that every fault happened."""
        assert self.proposed > self.accepted > 0
        assert min(self.preemptions, self.prefix_hits, self.deaths, self.failures, self.losses, self.blind) > 0, self
        assert len(self.speculations) > 2, self


def live(world: World, samplings: Seq[Sampling], prompt: Seq[int], length: int, seed: int) -> Lives:
    """Run one request per sampling for *length* tokens after *prompt*, with faults."""
    dice = random.Random(seed)
    max_len = len(prompt) + length + world.shape.k + 2
    num_blocks = NUM_SLOTS * -(-(len(prompt) + length) // BLOCK_SIZE) // 2  # too few blocks for all
    executor = Faulty(world.executor(NUM_SLOTS, max_len, BLOCK_SIZE, num_blocks), dice)
    beside = Beside(world.target.vocab, dice)
    scheduler = Scheduler(
        SchedulerConfig(NUM_SLOTS, BUDGET), CacheConfig(BLOCK_SIZE), _without_end(executor.info), proposers=[beside]
    )
    policy, inbox = FromThePast(world.shape.k), LocalInbox()
    controller = Controller(scheduler, policy, executor, inbox)
    inbox.put(
        Request(str(i), tuple(prompt), SamplingParams(), sampling, length, wants_steps=True)
        for i, sampling in enumerate(samplings)
    )
    texts: list[list[int]] = [[] for _ in samplings]
    forced, depths = 0, Counter[int]()
    while controller.scheduler.num_unfinished or not forced:
        outputs = controller.step()
        policy.hear(outputs)
        for output in outputs:
            assert output.error is None, output.error
            texts[int(output.request_id)] += output.token_ids
            if output.step is not None:
                depths[output.step.proposed] += 1
        if dice.random() < PREEMPTION and scheduler._queue.running:
            scheduler._queue.preempt_youngest()
            forced += 1
    stats = controller.stats()
    return Lives(
        np.array(texts),
        stats.proposed,
        stats.accepted,
        stats.preemptions,
        stats.prefix_hits,
        executor.epoch - 1,
        executor.proposer.failures,
        executor.losses,
        beside.drafts,
        depths,
    )


def _without_end(info: WorkerInfo) -> WorkerInfo:
    return structs.replace(info, eos_ids=())
