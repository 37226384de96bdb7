"""What the planner asks a speculation policy, and what the controller reports to it.

A policy changes the speed, never the output.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

from protos.messages import RoundPlan, StepCosts, Verdict
from runtime.core.sequence import Sequence

WARMING_ROUNDS = 2
"""Nothing is learnt of so many first rounds with drafts: the draft catches up with the sequences."""
OTHER_LOAD = 1.5
"""It is another load where the number of sequences rose or fell by this factor."""


def is_other_load(before: int, now: int) -> bool:
    """Return whether *now* sequences are another load than *before*; 0 sequences are none."""
    return now > 0 and max(before, now) >= OTHER_LOAD * min(before, now)


class Share(NamedTuple):
    """How often work is done: so that it takes *of_time* of the time, but in one of *rounds* rounds at least."""

    of_time: float
    rounds: int

    def pause(self, seconds: float, round_s: float) -> int:
        """Return the rounds without work after some that took *seconds*. Rounds take *round_s*, 0 if unknown."""
        return min(self.rounds - 1, int(seconds / (self.of_time * round_s))) if round_s else 0


@dataclass(frozen=True)
class FinishedStep:
    """A committed step and what it took.

    Attributes:
        plan: of the step.
        verdicts: of its rows.
        num_tokens: tokens added to requests.
        draft_s: seconds spent on drafts: proposing, and waiting for them.
        seconds: of the whole step, from planning to committing.
        lookup_s: of *draft_s*, those of proposers in the controller process.
        worker_is_up: whether the draft worker was; else there were no drafts but those of proposers.
    """

    plan: RoundPlan
    verdicts: Seq[Verdict]
    num_tokens: int
    draft_s: float
    seconds: float
    lookup_s: float = 0.0
    worker_is_up: bool = True

    @property
    def num_known(self) -> int:
        """How many tokens it fed, but for draft tokens."""
        return sum([row.length for row in self.plan.rows])

    @property
    def num_prompt_tokens(self) -> int:
        """How many tokens of prompts it read."""
        return 0 if self.plan.decodes else sum([row.length for row in self.plan.rows if row.length > 1])


class Policy(Protocol):
    """Chooses how many draft tokens each row gets in each step.

    `limit` is the largest K there can be, 0 without speculation; `current` is this step's; `changes` counts changes
    of K by reason; `least_survival` is this step's `RoundPlan.least_survival`, 0 where nothing stops by it;
    `predicted_speedup` is what is expected of speculation now, None without a prediction. `stays_plain`: neither this
    step nor the next has draft tokens, as far as is known.
    """

    @property
    def limit(self) -> int: ...  # noqa: D102

    @property
    def current(self) -> int: ...  # noqa: D102

    @property
    def changes(self) -> Mapping[str, int]: ...  # noqa: D102

    @property
    def least_survival(self) -> float: ...  # noqa: D102

    @property
    def predicted_speedup(self) -> float | None: ...  # noqa: D102

    @property
    def stays_plain(self) -> bool: ...  # noqa: D102

    def begin_step(self, running: Seq[Sequence]) -> None:
        """Decide for a step of the sequences *running*; later ones may start in it."""
        ...

    def num_draft_tokens(self, sequence: Sequence, source: int | None = None) -> int:
        """Return the most draft tokens that this sequence's row may get in this step, from one source or from any."""
        ...

    def end_step(self, step: FinishedStep) -> None:
        """Learn from a step. Steps without any source of drafts are not reported, those of an outage of it."""
        ...

    def revise(self, costs: StepCosts) -> None:
        """Go by new *costs* of steps from the next one on: models began to run compiled.

        Kept are `changes`, and what was learnt that does not depend on costs, such as acceptance.
        """
        ...


class NoSpeculation:
    """The policy without speculation: K is 0."""

    limit = current = 0
    least_survival = 0.0
    changes: Mapping[str, int] = MappingProxyType({})
    predicted_speedup: float | None = None
    stays_plain = True

    def begin_step(self, running: Seq[Sequence]) -> None:
        """Do nothing."""

    def num_draft_tokens(self, sequence: Sequence, source: int | None = None) -> int:
        """Return 0."""
        return 0

    def end_step(self, step: FinishedStep) -> None:
        """Do nothing."""

    def revise(self, costs: StepCosts) -> None:
        """Do nothing."""
