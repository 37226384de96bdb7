"""The metrics of a load run, by the names of vLLM's `bench serve`, for a table and for JSON."""

import math
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from cluster.bench.load import AcceptanceCounts, LoadRun

PERCENTILES = (50, 90, 95, 99)
LATENCIES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token (first excluded)",
    "itl": "Inter-token latency (between chunks)",
    "e2el": "End-to-end latency",
}


def metrics(run: LoadRun) -> dict[str, Any]:
    """Return all metrics of *run*; latencies in milliseconds, None if not measured."""
    answered = [one for one in run.requests if one.error is None]
    prompt, output = sum(one.num_prompt_tokens for one in answered), sum(one.num_output_tokens for one in answered)
    values: dict[str, Any] = {
        "duration": run.seconds,
        "completed": len(answered),
        "failed": len(run.requests) - len(answered),
        "errors": sorted({one.error for one in run.requests if one.error is not None}),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": len(answered) / run.seconds,
        "output_throughput": output / run.seconds,
        "total_token_throughput": (prompt + output) / run.seconds,
    }
    samples: dict[str, list[float]] = {
        "ttft": [one.first_s for one in answered if one.first_s is not None],
        "tpot": [one.per_token_s for one in answered if one.per_token_s is not None],
        "itl": [gap for one in answered for gap in one.gaps],
        "e2el": [one.last_s for one in answered],
    }
    for name, seconds in samples.items():
        values |= _latencies(name, seconds)
    return values | ({} if run.acceptance is None else _acceptance(run.acceptance))


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the *percent*-th percentile of sorted *values*, linearly interpolated."""
    at = (len(values) - 1) * percent / 100
    low, high = math.floor(at), math.ceil(at)
    return values[low] + (values[high] - values[low]) * (at - low)


def _latencies(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    values = sorted(1000 * each for each in seconds)
    keys = [f"mean_{name}_ms", *(f"p{percent}_{name}_ms" for percent in PERCENTILES)]
    if not values:
        return dict.fromkeys(keys)
    return dict(zip(keys, [sum(values) / len(values), *(percentile(values, p) for p in PERCENTILES)], strict=True))


def _acceptance(counted: AcceptanceCounts) -> dict[str, Any]:
    drafts, tokens = counted.drafts, counted.draft_tokens
    return {
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": tokens,
        "spec_decode_accepted_tokens": counted.accepted_tokens,
        "spec_decode_acceptance_rate": counted.accepted_tokens / tokens if tokens else None,
        "spec_decode_acceptance_length": 1 + counted.accepted_tokens / drafts if drafts else None,
        "spec_decode_per_position_acceptance_rates": [
            counted.per_position[position] / drafts for position in sorted(counted.per_position)
        ]
        if drafts
        else [],
    }


def tables(found: dict[str, Any]) -> list[Table]:
    """Return the tables to print."""
    counts = Table("", "", title="Serving benchmark", show_header=False)
    for label, key, form in (
        ("Answered", "completed", "d"),
        ("Failed", "failed", "d"),
        ("Seconds", "duration", ".2f"),
        ("Prompt tokens", "total_input_tokens", ",d"),
        ("Output tokens", "total_output_tokens", ",d"),
        ("Requests/s", "request_throughput", ".2f"),
        ("Output tokens/s", "output_throughput", ".1f"),
        ("All tokens/s", "total_token_throughput", ".1f"),
    ):
        counts.add_row(label, format(found[key], form))
    _add_acceptance(counts, found)
    latencies = Table("ms", "mean", *(f"p{percent}" for percent in PERCENTILES))
    for name, label in LATENCIES.items():
        values = [found[f"mean_{name}_ms"], *(found[f"p{percent}_{name}_ms"] for percent in PERCENTILES)]
        latencies.add_row(label, *("-" if value is None else f"{value:.2f}" for value in values))
    return [counts, latencies]


def _add_acceptance(table: Table, found: dict[str, Any]) -> None:
    rate = found.get("spec_decode_acceptance_rate")
    if "spec_decode_num_drafts" not in found:
        table.add_row("Acceptance", "not published by this server (/metrics)")
    elif rate is None:
        table.add_row("Acceptance", "nothing was drafted")
    else:
        table.add_row("Acceptance", f"{rate:.1%}")
        table.add_row("Tokens per step with a draft", f"{found['spec_decode_acceptance_length']:.2f}")
        shares = found["spec_decode_per_position_acceptance_rates"]
        table.add_row("Accepted, by position", "  ".join(f"{share:.0%}" for share in shares))
