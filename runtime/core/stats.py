"""Engine-wide counters."""

from bisect import bisect_left
from dataclasses import dataclass, field

from protos.stats import STEP_TOKENS, EngineStats
from runtime.core.sequence import SpeculationCounts


@dataclass(slots=True)
class EngineCounters:
    """What the `Scheduler` counts as it goes."""

    steps: int = 0
    draft_failures: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)
    fed_tokens: int = 0
    step_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS) + 1))

    def count_step(self, num_tokens: int) -> None:
        """A step that fed so many tokens was committed."""
        self.steps += 1
        self.fed_tokens += num_tokens
        self.step_tokens[bisect_left(STEP_TOKENS, num_tokens)] += 1

    def snapshot(self, num_running: int, num_waiting: int, kv_usage: float) -> EngineStats:
        """Return the counts with the gauges given."""
        guesses = self.speculation
        return EngineStats(
            steps=self.steps,
            drafting_rounds=guesses.steps,
            proposed=guesses.proposed,
            accepted=guesses.accepted,
            accepted_per_pos=tuple(guesses.accepted_per_pos),
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
