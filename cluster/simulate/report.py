"""What `slipstream simulate` prints and writes about replays."""

import json
from collections.abc import Sequence as Seq
from dataclasses import asdict
from typing import Any

from rich.table import Table

from cluster.simulate.predict import SpeedupPrediction, best_by_shape, threshold
from cluster.simulate.results import Replay
from protos.outputs import SpeculativeDecodingMetrics


def per_prompt(replay: Replay) -> list[float]:
    """Return the draft tokens matched per step of the target, for each answer."""
    return [round(answer.stats.accepted / len(answer.steps), 4) for answer in replay.answers]


def per_dataset(replay: Replay) -> list[float]:
    """Return the draft tokens matched per step of the target, for each log."""
    found = []
    for dataset in sorted({answer.dataset for answer in replay.answers}):
        answers = [answer for answer in replay.answers if answer.dataset == dataset]
        steps = sum(len(answer.steps) for answer in answers)
        found.append(round(sum(answer.stats.accepted for answer in answers) / steps, 4))
    return found


def lines(replay: Replay) -> list[str]:
    """Return the figures of one replay as lines."""
    metrics = replay.metrics
    found = [
        f"{replay.name}, K = {replay.k}",
        *(f"  {count} answers: {rule}" for rule, count in replay.rules.items()),
        f"  Average tokens matched per prompt: {per_prompt(replay)}",
        f"  Average tokens matched per dataset: {per_dataset(replay)}",
    ]
    if metrics.mean_acceptance_length is None:
        return [*found, "  nothing was drafted"]
    shares = ", ".join(f"{share:.0%}" for share in metrics.acceptance_per_position)
    return [
        *found,
        f"  mean acceptance length: {metrics.mean_acceptance_length:.2f} tokens per step with a draft "
        f"({metrics.num_accepted_draft_tokens} of {metrics.num_draft_tokens} draft tokens accepted), "
        f"{replay.tokens_per_step:.2f} per step",
        f"  acceptance by depth: {shares}",
        *_expected(replay),
    ]


def _expected(replay: Replay) -> list[str]:
    """Return a line with what is expected by the logged probabilities of the target, where it is known."""
    expected = replay.expected
    if expected is None or expected.length is None:
        return []
    count = sum(answer.expected is not None for answer in replay.answers)
    shares = ", ".join(f"{share:.0%}" for share in expected.by_depth)
    return [f"  expected by the logged probabilities, {count} answers: {expected.length:.2f} tokens per step; {shares}"]


def comparison(replays: Seq[Replay]) -> Table:
    """Return a table of several replays."""
    table = Table("draft", "K", "steps with a draft", "acceptance length", "tokens per step", "acceptance by depth")
    for replay in replays:
        metrics = replay.metrics
        length = metrics.mean_acceptance_length
        table.add_row(
            replay.name,
            str(replay.k),
            f"{metrics.num_spec_steps / replay.num_steps:.0%}",
            "-" if length is None else f"{length:.2f}",
            f"{replay.tokens_per_step:.2f}",
            " ".join(f"{share:.2f}" for share in metrics.acceptance_per_position),
        )
    return table


def matched_lines(replays: Seq[Replay]) -> list[str]:
    """Return a JSON line for each answer of each replay: the draft tokens matched so far after every step."""
    return [
        json.dumps({"draft": replay.name, "k": replay.k, "answer": number, "matched": answer.matched})
        for replay in replays
        for number, answer in enumerate(replay.answers)
    ]


def as_dict(replay: Replay) -> dict[str, Any]:
    """Return all figures of a replay for JSON."""
    metrics: SpeculativeDecodingMetrics = replay.metrics
    return {
        "draft": replay.name,
        "num_speculative_tokens": replay.k,
        "rules": replay.rules,
        "num_steps": replay.num_steps,
        "tokens_per_step": replay.tokens_per_step,
        "matched_per_prompt": per_prompt(replay),
        "matched_per_dataset": per_dataset(replay),
        **asdict(metrics),
        "expected_acceptance_length": None if replay.expected is None else replay.expected.length,
        "expected_acceptance_per_position": None if replay.expected is None else replay.expected.by_depth,
    }


def speedups(predictions: Seq[SpeedupPrediction]) -> list[Table]:
    """Return a table for each context: the speed-up of every draft by batch size."""
    return [_speedups_at(context, predictions) for context in _contexts(predictions)]


def _contexts(predictions: Seq[SpeedupPrediction]) -> list[int]:
    return sorted({each.shape[1] for each in predictions})


def _speedups_at(context: int, predictions: Seq[SpeedupPrediction]) -> Table:
    here = [each for each in predictions if each.shape[1] == context]
    sizes = sorted({each.shape[0] for each in here})
    table = Table(
        "draft", "K", *(str(rows) for rows in sizes), title=f"predicted speed-up by batch size, context {context}"
    )
    for name, k in dict.fromkeys((each.name, each.k) for each in here):
        found = {each.shape[0]: f"{each.speedup:.2f}" for each in here if (each.name, each.k) == (name, k)}
        table.add_row(name, str(k), *(found.get(rows, "-") for rows in sizes))
    return table


def advice(predictions: Seq[SpeedupPrediction]) -> list[str]:
    """Return lines: the best K of each draft by batch size, and where it stops to pay."""
    best, found = best_by_shape(predictions), []
    for context in _contexts(predictions):
        for name in dict.fromkeys(each.name for each in predictions):
            chosen = [
                each
                for (draft, shape), each in sorted(best.items(), key=_order)
                if (draft, shape[1]) == (name, context)
            ]
            ks = ", ".join(f"{each.k} at {each.shape[0]} ({each.speedup:.2f}x)" for each in chosen)
            found.append(
                f"{name}, context {context}: best K by batch size: {ks}; {threshold(predictions, name, context)}"
            )
    return found


def _order(item: tuple[tuple[str, tuple[int, int]], SpeedupPrediction]) -> tuple[int, int]:
    return item[1].shape
