"""The summary line: what an engine did since the last one, in figures that a person reads at a glance."""

import time
from dataclasses import dataclass, field

from protos.stats import EngineStats


@dataclass(slots=True)
class Totals:
    """What one front end has counted up to a moment, and the controller's snapshot of that moment."""

    at: float = field(default_factory=time.monotonic)
    prompt: int = 0
    generated: int = 0
    finished: int = 0
    stats: EngineStats = field(default_factory=EngineStats)


def summarised(now: Totals, before: Totals) -> str:
    """Return what happened between two moments."""
    seconds = max(now.at - before.at, 1e-9)
    stats = now.stats
    line = (
        f"{stats.num_running} running, {stats.num_waiting} waiting, {now.finished - before.finished} finished, "
        f"prompt {(now.prompt - before.prompt) / seconds:.1f} tokens/s, "
        f"generation {(now.generated - before.generated) / seconds:.1f} tokens/s, "
        f"KV cache {stats.kv_usage:.0%}"
    )
    return line + _hits(stats, before.stats) + _speculation(stats, before.stats)


def _hits(now: EngineStats, before: EngineStats) -> str:
    queries = now.prefix_queries - before.prefix_queries
    return f", prefix hits {(now.prefix_hits - before.prefix_hits) / queries:.0%}" if queries else ""


def _speculation(now: EngineStats, before: EngineStats) -> str:
    """Acceptance, the speed-up over plain decoding where it can be estimated, K, and the draft's share of the time."""
    drafts, proposed = now.drafting_rounds - before.drafting_rounds, now.proposed - before.proposed
    if not drafts or not proposed:
        return {"paused": ", speculation paused at this batch size", "no_draft": ", no draft"}.get(now.speculation, "")
    accepted = now.accepted - before.accepted
    line = f", accept {accepted / drafts:.1f}/{proposed / drafts:.1f}, {accepted / proposed:.0%}"
    speculative_s, plain_s = now.speculative_s - before.speculative_s, now.plain_s - before.plain_s
    if speculative_s > 0:
        line += f", est. speed-up {plain_s / speculative_s:.2f}x"
    line += f", K={now.num_speculative_tokens}"
    steps_s, propose_s = now.steps_s - before.steps_s, now.phases.propose_s - before.phases.propose_s
    return line + (f", draft {propose_s / steps_s:.0%} of step" if steps_s > 0 and propose_s > 0 else "")
