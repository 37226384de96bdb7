"""Engine-wide counters, and the frozen picture of them that metrics and `LLM` read."""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from protos.interfaces import PhaseTimes
from runtime.core.sequence import SpeculationCounts

SpeculationState = Literal["off", "on", "paused", "no_draft"]
"""Not configured; guessing; held back by the batch size; without the draft worker that would guess."""

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
"""Bounds of the histogram of tokens a step feeds."""


class EngineStats(msgspec.Struct, frozen=True, gc=False):
    """The engine at one moment. Counters count from its start; token counts are of committed tokens.

    Attributes:
        steps: rounds committed.
        drafting_rounds: row-rounds in which something was proposed.
        proposed, accepted, accepted_per_pos: draft tokens; index j is the j-th of a round.
        prefix_queries, prefix_hits: tokens looked up in and found in the prefix cache.
        num_running, num_waiting: requests now.
        kv_usage: share of KV blocks owned now, 0 to 1.
        draft_changes: how often the draft's service changed, by reason.
        guess_changes: how often the number of guesses changed with the batch size, by reason.
        target_losses: how often the target group was lost and rebuilt.
        num_speculative_tokens: K now.
        speculation: what becomes of it now.
        step_tokens: steps by how many tokens they fed, drafts included: up to each of `STEP_TOKENS`, then above.
        fed_tokens: those tokens, over all steps.
        phases: seconds of the phases of all rounds, guesses made beside the controller included.
        steps_s, guessed_s, plain_s: see `runtime.core.timing.StepClock`.
        target_is_lost, draft_is_away: whether it is being rebuilt now, and whether a draft worker is missed now.
    """

    steps: int = 0
    drafting_rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    accepted_per_pos: tuple[int, ...] = ()
    draft_failures: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    draft_changes: dict[str, int] = {}
    guess_changes: dict[str, int] = {}
    target_losses: int = 0
    num_speculative_tokens: int = 0
    speculation: SpeculationState = "off"
    step_tokens: tuple[int, ...] = ()
    fed_tokens: int = 0
    phases: PhaseTimes = PhaseTimes()
    steps_s: float = 0.0
    guessed_s: float = 0.0
    plain_s: float = 0.0
    target_is_lost: bool = False
    draft_is_away: bool = False


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
