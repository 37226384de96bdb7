"""Engine-wide counters and step timing."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from protos.messages import RoundPlan, StepCosts, TokenOutput, Verdict
from protos.stats import STEP_TOKENS, EngineStats, PhaseTimes
from runtime.core.sequence import SpeculationCounts
from runtime.policy.interpolation import interpolate


@dataclass(slots=True)
class EngineCounters:
    """What the `Scheduler` and its parts count."""

    steps: int = 0
    draft_failures: int = 0
    propose_s: float = 0.0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)
    fed_tokens: int = 0
    step_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS) + 1))

    def count_step(self, num_tokens: int) -> None:
        """Count a committed step that fed *num_tokens*."""
        self.steps += 1
        self.fed_tokens += num_tokens
        self.step_tokens[bisect_left(STEP_TOKENS, num_tokens)] += 1

    def snapshot(self, num_running: int, num_waiting: int, kv_usage: float) -> EngineStats:
        """Return the counts with the given gauges."""
        speculation = self.speculation
        return EngineStats(
            steps=self.steps,
            drafting_rounds=speculation.steps,
            proposed=speculation.proposed,
            accepted=speculation.accepted,
            accepted_per_pos=speculation.accepted_per_pos,
            draft_failures=self.draft_failures,
            preemptions=self.preemptions,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            prefix_queries=self.prefix_queries,
            prefix_hits=self.prefix_hits,
            step_tokens=tuple(self.step_tokens),
            fed_tokens=self.fed_tokens,
            num_running=num_running,
            num_waiting=num_waiting,
            kv_usage=kv_usage,
        )


class StepClock:
    """Times whole steps, and estimates what plain decoding would have taken for the tokens of speculative ones.

    A plain step gives every row one token. It costs the forward of one token per row, as measured in warm-up, plus all
    that the speculative step spent outside its forward and its drafting. Where the speculative step's forward took
    longer than measured, as with long contexts, or with fewer threads beside busy neighbours, the plain one would have
    been as much slower; and as much faster where the measurement itself was disturbed. Where plain steps are begun
    ahead, their forwards hide the rest. Without measured costs nothing is estimated.

    Args:
        costs: as measured before serving; None: they were not.
        is_awaited: whether rounds report how long a forward took; on a GPU it may be how long it took to launch.
        runs_ahead: whether plain steps are begun ahead.

    Attributes:
        steps_s: seconds of all steps, from planning to committing.
        speculative_s: of those, the steps with drafts in which every row decoded.
        plain_s: the estimated seconds of plain steps for the tokens of the latter.
    """

    def __init__(self, costs: StepCosts | None, *, is_awaited: bool, runs_ahead: bool = False) -> None:
        self._least, self._runs_ahead = 0.0 if is_awaited else 1.0, runs_ahead
        self._target_s = {} if costs is None else costs.target_s
        self._before = PhaseTimes()
        self.steps_s = self.speculative_s = self.plain_s = 0.0

    def revise(self, costs: StepCosts) -> None:
        """Estimate by new costs from now on."""
        self._target_s = costs.target_s

    def add(
        self,
        plan: RoundPlan,
        verdicts: Sequence[Verdict],
        outputs: Sequence[TokenOutput],
        times: PhaseTimes,
        seconds: float,
    ) -> float:
        """Add a committed step that took *seconds*; *times* are those of all steps so far.

        Returns:
            The seconds that the step spent on drafts: proposing, and waiting for them.
        """
        self.steps_s += seconds
        before, self._before = self._before, times
        draft_s = times.propose_s + times.transfer_s - before.propose_s - before.transfer_s
        if not (self._target_s and (plan.speculates or any(row.k for row in plan.rows)) and plan.decodes):
            return draft_s
        # What differs from a plain step: drafting, and the forward over draft tokens.
        score_s = times.score_s - before.score_s
        num_rows = len(plan.rows)
        num_scored = num_rows + sum([verdict.proposed for verdict in verdicts])
        slowdown = max(self._least, score_s / interpolate(self._target_s, num_scored))
        forward_s, others_s = slowdown * interpolate(self._target_s, num_rows), max(0.0, seconds - draft_s - score_s)
        plain_s = max(forward_s, others_s) if self._runs_ahead else forward_s + others_s
        self.speculative_s += seconds
        self.plain_s += plain_s * sum([len(output.token_ids) for output in outputs]) / num_rows
        return draft_s
