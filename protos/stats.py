"""Snapshots of the engine's counters and gauges, as metrics and `LLM.stats` read them."""

import time
from typing import Literal

import msgspec

SpeculationState = Literal["off", "on", "paused", "no_draft"]
"""Not configured; drafting; paused by the policy; paused because the draft worker is lost."""

DraftChange = Literal["started", "late", "in_time", "lost", "pair_lost", "targets_lost", "revived"]
"""Why the draft worker entered or left service: "pair_lost" is the end of its channel to the target, which is noticed
before "lost" if the draft has died; "targets_lost" is that of the target group."""

SpeculationChange = Literal[
    "batch_size_rose", "batch_size_fell", "batch_size_table", "pays", "does_not_pay", "rose", "fell"
]
"""Why K changed: by the batch size; by the gain that the adaptive policy predicts; by what a bandit tries."""

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
"""Bounds of the histogram of tokens per step."""


class PhaseTimes(msgspec.Struct, frozen=True, gc=False):
    """Seconds spent in each phase over all rounds, by the clock of the process that did the work.

    Attributes:
        propose_s: drafting.
        transfer_s: the target's wait for drafts beyond the time spent drafting.
        score_s, verify_s: the target's forward; sampling and verification.
        late_drafts: rounds whose draft did not arrive before its deadline.
    """

    propose_s: float = 0.0
    transfer_s: float = 0.0
    score_s: float = 0.0
    verify_s: float = 0.0
    late_drafts: int = 0


class Outage(msgspec.Struct, frozen=True, gc=False):
    """The target group is lost and being rebuilt.

    Attributes:
        reason: why it was lost.
        since: when, in seconds since 1970.
        lacks: the workers for which the cluster has no room, or whose machine is not reached; empty otherwise.
        retry_after_s: for how long the group has lacked room is over the limit, and requests are refused with this
            delay; None while they wait.
    """

    reason: str
    since: float
    lacks: str = ""
    retry_after_s: float | None = None

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.since))
        what = "it is being started again"
        if self.lacks:
            what = f"there is no room for {self.lacks}, or no way to its machine"
        cause = self.reason.partition(":")[0]  # details may hold paths and addresses, which clients must not see
        return f"the target group is lost since {since} ({cause}), and {what}"


class EngineStats(msgspec.Struct, frozen=True, gc=False):
    """A snapshot of the engine. Counters count from its start; token counts are of committed tokens.

    Attributes:
        steps: rounds committed.
        drafting_rounds: row-rounds in which something was proposed.
        proposed, accepted, accepted_per_pos: draft tokens; index j is the j-th position of a draft.
        prefix_queries, prefix_hits: tokens looked up and tokens found in the prefix cache.
        num_running, num_waiting: requests now.
        kv_usage: share of KV blocks in use now, 0 to 1.
        draft_changes: changes of the draft service, by `DraftChange`.
        speculation_changes: changes of the number of draft tokens, by `SpeculationChange`.
        target_losses: losses of the target group.
        num_speculative_tokens: K now, the largest of all rows.
        predicted_speedup: of speculation over plain decoding, by the policy `adaptive`; None by the others.
        speculation: its state now.
        step_tokens: steps by the tokens they fed, draft tokens included: up to each of `STEP_TOKENS`, then above.
        fed_tokens: the sum over all steps.
        phases: seconds per phase over all rounds; includes drafting in the controller process.
        steps_s, speculative_s, plain_s: see `runtime.core.stats.StepClock`.
        outage: the loss of the target group, while it is rebuilt.
        draft_is_down: whether the draft worker is absent.
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
    speculation_changes: dict[str, int] = {}
    target_losses: int = 0
    num_speculative_tokens: int = 0
    predicted_speedup: float | None = None
    speculation: SpeculationState = "off"
    step_tokens: tuple[int, ...] = ()
    fed_tokens: int = 0
    phases: PhaseTimes = PhaseTimes()
    steps_s: float = 0.0
    speculative_s: float = 0.0
    plain_s: float = 0.0
    outage: Outage | None = None
    draft_is_down: bool = False

    @property
    def target_is_lost(self) -> bool:
        """Whether the target group is being rebuilt."""
        return self.outage is not None
