"""The report of a comparison of methods: tables in markdown, JSON, and a plot of the speed-ups."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict
from functools import partial
from typing import Any

import msgspec

from cluster.bench.compared import NOTHING, BlockFigures, ComparedMethod, accepted_tokens
from cluster.simulate.charts import Chart

PLAIN, OVERALL = "plain", "overall"
"""The row without speculation, and the column of all categories together."""
SPEEDUP = "Speed-up over plain decoding (95 % interval)"
ACCEPTED = "Mean accepted tokens, per step of the target"

Figure = Callable[[str | None], str]


def lines(found: Seq[ComparedMethod]) -> list[str]:
    """Return both tables as markdown that is aligned for terminals, and a line on the answers of each method."""
    return [
        f"{SPEEDUP}:",
        "",
        *markdown(speedups(found)),
        "",
        f"{ACCEPTED}:",
        "",
        *markdown(accepted(found)),
        "",
        *(line for each in found for line in _answers(each)),
    ]


def speedups(found: Seq[ComparedMethod]) -> list[list[str]]:
    """Return the rows of the table of speed-ups, the first of which has the names of the columns."""
    plain = _row(PLAIN, found, lambda category: f"{_plain(found, category).tokens_per_second:.1f} tokens/s")
    return [_head(found), plain, *(_row(each.name, found, partial(_speedup, each)) for each in found)]


def accepted(found: Seq[ComparedMethod]) -> list[list[str]]:
    """Return the rows of the table of mean accepted tokens, the first of which has the names of the columns."""
    plain = _row(PLAIN, found, lambda category: f"{accepted_tokens([_plain(found, category)]):.2f}")
    return [_head(found), plain, *(_row(each.name, found, partial(_accepted, each)) for each in found)]


def _head(found: Seq[ComparedMethod]) -> list[str]:
    return ["method", *found[0].names, OVERALL]


def _row(name: str, found: Seq[ComparedMethod], figure: Figure) -> list[str]:
    return [name, *(figure(category) for category in (*found[0].names, None))]


def _plain(found: Seq[ComparedMethod], category: str | None) -> BlockFigures:
    """Return all that was done without speculation, once for each method."""
    return sum((figures for each in found for figures in each.of(category)[0]), NOTHING)


def _speedup(method: ComparedMethod, category: str | None) -> str:
    """Return a speed-up with its interval; without one if it is from a single block."""
    found = method.speedup(category)
    if found.low == found.high:
        return f"{found.value:.2f}"
    return f"{found.value:.2f} ({found.low:.2f} - {found.high:.2f})"


def _accepted(method: ComparedMethod, category: str | None) -> str:
    return f"{method.accepted(category):.2f}"


def markdown(rows: Seq[Seq[str]]) -> list[str]:
    """Return the lines of a markdown table whose first row is the head, with columns of even width."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    padded = [f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |" for row in cells]
    return [padded[0], f"|{'|'.join('-' * (width + 2) for width in widths)}|", *padded[1:]]


def _answers(method: ComparedMethod) -> list[str]:
    """Return lines on whether the answers are those of plain decoding, and on what is wrong with the figures."""
    found, notes = method.identity, []
    if not method.counts.proposed:
        notes.append(f"WARNING: {method.name} proposed no draft tokens")
    if method.turns_left_out:
        notes.append(f"{method.name}: turns not asked because they did not fit the context: {method.turns_left_out}")
    if method.draft_failures:
        notes.append(f"WARNING: {method.name}: drafting failed in {method.draft_failures} rounds; its messages say why")
    if found is None:
        rule = method.speculative.rejection_sample_method
        return [f"{method.name}: rule {rule!r} does not promise the sampled answers of plain decoding", *notes]
    line = f"{method.name}: {found.identical} of {found.sequences} answers equal those of plain decoding"
    if found.ties:
        line += f"; {found.ties} differ after a floating-point tie"
    if found.violations:
        notes.append(f"VIOLATED: {method.name}: {found.violations} answers differ WITHOUT a tie. {found.explanation}")
    return [line, *notes]


def as_dict(found: Seq[ComparedMethod]) -> dict[str, Any]:
    """Return all figures for JSON."""
    return {
        "categories": found[0].names,
        "methods": [_method(each) for each in found],
    }


def _method(each: ComparedMethod) -> dict[str, Any]:
    verdict = each.identity
    return {
        "name": each.name,
        "speculative_config": asdict(each.speculative),
        OVERALL: _figures(each, None),
        "categories": {category: _figures(each, category) for category in each.names},
        "blocks": [
            {"category": category, PLAIN: asdict(plain), "method": asdict(method)}
            for category, plain, method in zip(each.categories, each.plain, each.method, strict=True)
        ],
        "answers": None if verdict is None else {"passed": verdict.passed, **msgspec.to_builtins(verdict)},
        "proposed": each.counts.proposed,
        "accepted": each.counts.accepted,
        "draft_failures": each.draft_failures,
        "turns_left_out": each.turns_left_out,
    }


def _figures(each: ComparedMethod, category: str | None) -> dict[str, Any]:
    plain, method = (sum(figures, NOTHING) for figures in each.of(category))
    return {
        "speedup": asdict(each.speedup(category)),
        "mean_speedup": each.mean_speedup(category),
        "mean_accepted_tokens": each.accepted(category),
        PLAIN: asdict(plain),
        "method": asdict(method),
    }


def chart(found: Seq[ComparedMethod]) -> Chart:
    """Return the speed-up of every method by category."""
    names: list[str | None] = [*found[0].names, None]
    points = {each.name: [(x, each.speedup(name).value) for x, name in enumerate(names)] for each in found}
    places = tuple(name or OVERALL for name in names)
    return Chart("Speed-up over plain decoding", "category", "speed-up", points, 1.0, places)
