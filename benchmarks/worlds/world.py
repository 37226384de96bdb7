"""Worlds, and how fast policies are in them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.worlds.costs import QUIET, EngineCosts, Noise
from benchmarks.worlds.engine import WorkClock, WorldEngine
from protos.messages import Verdict
from runtime.core.sequence import Sequence as EngineSequence
from runtime.policy.acceptance import DecodingRow
from runtime.policy.adaptive import AdaptivePolicy
from runtime.policy.allocation import Allocation
from runtime.policy.base import NoSpeculation, Policy
from runtime.policy.choosers import ChainChooser, Chooser, TreeChooser
from runtime.policy.cost_model import RoundCosts
from runtime.policy.round_costs import RoundCostModel

LIMIT, MAX_ROWS = 8, 256
"""Most draft tokens of a row, and most rows, of all engines."""
FIXED = (0, 1, 2, 3, 5, 8)
"""Numbers of draft tokens that `adaptive` is compared with."""


CHOOSE_S, CHOOSE_ROW_S, RECORD_S = 1.5e-4, 8e-6, 4e-6
"""What `adaptive` takes to choose, and more for each row, and to learn from a row."""


@dataclass(frozen=True)
class WorldPhase:
    """A part of a world.

    Attributes:
        num_rows: requests at once.
        rates: at which their drafts are right, in turns.
        rounds: that it takes without speculation, about.
        slowness: factor of all seconds.
        is_counted: whether its time is part of the result.
    """

    num_rows: int
    rates: Sequence[float]
    rounds: int
    slowness: float = 1.0
    is_counted: bool = True


@dataclass(frozen=True)
class World:
    """An engine, and what happens to it.

    Attributes:
        name: of a line of the table.
        costs: of rounds.
        phases: one after another.
        noise: of the rounds' seconds.
        prompt, answer: tokens of each request.
        target_error, draft_error: factors by which what warm-up measured is wrong.
        has_trees: whether drafts are trees, with twice as many nodes for each further level; else chains.
    """

    name: str
    costs: EngineCosts
    phases: Sequence[WorldPhase]
    noise: Noise = QUIET
    prompt: int = 32
    answer: int = 256
    target_error: float = 1.0
    draft_error: float = 1.0
    has_trees: bool = False


class TimedChooser:
    """Another chooser, whose work takes time by the policy's clock."""

    def __init__(self, inner: Chooser, clock: WorkClock) -> None:
        self._inner, self._clock = inner, clock
        self.age, self.describe, self.sizes = inner.age, inner.describe, inner.sizes

    def choose(self, rows: Sequence[DecodingRow], costs: RoundCosts) -> Allocation:
        """See `Chooser`."""
        self._clock.now += CHOOSE_S + CHOOSE_ROW_S * len(rows)
        return self._inner.choose(rows, costs)

    def record(self, verdict: Verdict, row: DecodingRow, asked: Sequence[int], source: int) -> None:
        """See `Chooser`."""
        self._clock.now += RECORD_S
        self._inner.record(verdict, row, asked, source)


class FixedPolicy(NoSpeculation):
    """The same number of draft tokens for all rows in all rounds."""

    def __init__(self, k: int, *, may_branch: bool) -> None:
        self.limit = self.current = k
        self.stays_plain = k == 0
        self._may_branch = may_branch

    def num_draft_tokens(self, sequence: EngineSequence, source: int | None = None) -> int:
        """See `Policy`."""
        most = self.current
        return most if self._may_branch else min(most, sequence.depth)


@dataclass(frozen=True)
class WorldResult:
    """How fast policies were in a world.

    Attributes:
        world: its name.
        tokens_per_s: of `adaptive`.
        fixed: tokens per second by fixed number of draft tokens.
        switches: how often `adaptive` switched speculation on or off.
        probes: share of its time in rounds with drafts while speculation was off, or without while it was on.
        rounds: of `adaptive`.
    """

    world: str
    tokens_per_s: float
    fixed: Mapping[int, float]
    switches: int
    probes: float
    rounds: int

    @property
    def over_plain(self) -> float:
        """How many times faster `adaptive` is than no speculation."""
        return self.tokens_per_s / self.fixed[0]

    @property
    def best(self) -> int:
        """The best fixed number of draft tokens, 0 included."""
        return max(self.fixed, key=self.fixed.__getitem__)

    @property
    def over_best(self) -> float:
        """How many times faster `adaptive` is than the best fixed number of draft tokens."""
        return self.tokens_per_s / self.fixed[self.best]

    def __str__(self) -> str:
        ratios = f"{self.over_plain:.3f} | {self.over_best:.3f} | {self.best}"
        return f"| {self.world} | {ratios} | {self.switches} | {100 * self.probes:.1f} % | {self.rounds} |"

    def as_json(self) -> dict[str, Any]:
        """Return it for a file."""
        return {**asdict(self), "over_plain": self.over_plain, "over_best": self.over_best, "best": self.best}


def tree_levels(num_nodes: int) -> int:
    """Return the levels of a tree of so many nodes: each has twice as many as the one before."""
    return (num_nodes + 1).bit_length() - 1


def compare(world: World, seed: int) -> WorldResult:
    """Run a world with `adaptive` and with each fixed number of draft tokens."""
    fixed = {k: simulate(world, FixedPolicy(k, may_branch=world.has_trees), seed)[0] for k in FIXED}
    clock = WorkClock()
    policy = adaptive(world, clock)
    rate, engine = simulate(world, policy, seed, clock)
    switches = sum(policy.changes.values())
    return WorldResult(world.name, rate, fixed, switches, engine.probes_s / engine.seconds, engine.num_rounds)


def adaptive(world: World, clock: WorkClock) -> AdaptivePolicy:
    """Return the policy as an engine of this world has it."""
    most_tokens = MAX_ROWS * (LIMIT + 1)
    costs = world.costs.warm_up(most_tokens, MAX_ROWS, world.target_error, world.draft_error)
    model = RoundCostModel(costs, most_tokens, MAX_ROWS, LIMIT)
    chooser = TreeChooser(LIMIT) if world.has_trees else ChainChooser(LIMIT)
    timed = TimedChooser(chooser, clock)
    return AdaptivePolicy(LIMIT, timed, model, may_branch=world.has_trees, clock=clock)


def simulate(world: World, policy: Policy, seed: int, clock: WorkClock | None = None) -> tuple[float, WorldEngine]:
    """Run a world; return the tokens per second of the phases that count, and the engine."""
    levels = tree_levels if world.has_trees else int
    engine = WorldEngine(
        policy, world.costs, world.noise, clock or WorkClock(), world.prompt, world.answer, levels, seed
    )
    seconds = tokens = 0.0
    for phase in world.phases:
        began_s, before = engine.seconds, engine.num_tokens
        engine.rates, engine.slowness = phase.rates, phase.slowness
        engine.run(phase.num_rows, phase.rounds * phase.num_rows)
        seconds += (engine.seconds - began_s) * phase.is_counted
        tokens += (engine.num_tokens - before) * phase.is_counted
    return tokens / seconds, engine
