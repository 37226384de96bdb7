"""The lines that are plotted about replays, as one HTML file without dependencies, or as a PNG by matplotlib."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from cluster.simulate.predict import SpeedupPrediction, best_by_shape
from cluster.simulate.results import Replay
from protos.errors import ConfigError

Point = tuple[int, float]
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's, which people with colour blindness can tell apart."""
WIDTH, HEIGHT, MARGIN, LEGEND = 640, 320, 48, 20
"""Pixels: of the plot with its margins, and of a line of the legend."""
STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:48em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{padding:.2em .8em;border-bottom:1px solid #ccc;text-align:right}"
    "td:first-child,th:first-child{text-align:left}svg{max-width:100%}"
)


@dataclass(frozen=True)
class Chart:
    """Lines by name, over whole numbers.

    Attributes:
        level: a value that is marked, such as a speed-up of 1.
        places: what the numbers from 0 on stand for; then points are not joined. Empty: they stand for themselves.
    """

    title: str
    across: str
    up: str
    lines: dict[str, list[Point]]
    level: float | None = None
    places: tuple[str, ...] = ()

    def label(self, x: int) -> str:
        """Return what is written at a place on the horizontal axis."""
        return self.places[x] if self.places else f"{x:g}"

    @property
    def xs(self) -> list[int]:
        """All places on the horizontal axis, which are evenly spaced."""
        return sorted({x for points in self.lines.values() for x, _ in points})

    @property
    def top(self) -> float:
        """The end of the vertical axis, which begins at 0."""
        highest = max((y for points in self.lines.values() for _, y in points), default=1.0)
        return 1.1 * max(highest, self.level or 0.0, 1e-9)


def charts(replays: Seq[Replay], predictions: Seq[SpeedupPrediction]) -> list[Chart]:
    """Return acceptance by depth, and the speed-up by batch size for each context, at the best K of each draft."""
    by_depth = {
        f"{each.name}, K = {each.k}": [
            (depth, share) for depth, share in enumerate(each.metrics.acceptance_per_position, 1)
        ]
        for each in replays
    }
    found = [Chart("Acceptance by depth", "depth", "share of drafts accepted so far", by_depth)]
    best = sorted(best_by_shape(predictions).values(), key=lambda each: each.shape)
    for context in sorted({each.shape[1] for each in best}):
        lines: dict[str, list[Point]] = {}
        for each in best:
            if each.shape[1] == context:
                lines.setdefault(each.name, []).append((each.shape[0], each.speedup))
        found.append(Chart(f"Predicted speed-up, context {context}", "batch size", "speed-up, best K", lines, 1.0))
    return found


def html(found: Seq[Chart], replays: Seq[Replay], notes: Seq[str]) -> str:
    """Return a page with the charts, a table of the replays and the *notes* on how they were made."""
    head = ["draft", "K", "acceptance length", "tokens per step"]
    rows = [[each.name, str(each.k), _length(each), f"{each.tokens_per_step:.2f}"] for each in replays]
    return page("Drafts", found, [[head, *rows]], notes)


def page(title: str, found: Seq[Chart], tables: Seq[Seq[Seq[str]]], notes: Seq[str]) -> str:
    """Return a page with *tables*, whose first rows are their heads, the charts, and a list of *notes*."""
    listed = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
        f"<h1>{escape(title)}</h1>{''.join(map(_table, tables))}{''.join(map(_svg, found))}<ul>{listed}</ul></html>\n"
    )


def _table(rows: Seq[Seq[str]]) -> str:
    tags = ["th", *["td"] * (len(rows) - 1)]
    lines = ["".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) for tag, row in zip(tags, rows, strict=True)]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _length(replay: Replay) -> str:
    length = replay.metrics.mean_acceptance_length
    return "-" if length is None else f"{length:.2f}"


def _svg(chart: Chart) -> str:
    bottom, height = HEIGHT - MARGIN, HEIGHT + LEGEND * len(chart.lines)
    parts = [f'<path d="M{MARGIN} {MARGIN}V{bottom}H{WIDTH - MARGIN}" fill="none" stroke="#333"/>']
    parts += [_text(_across(chart, x), bottom + 18, chart.label(x)) for x in chart.xs]
    for step in range(5):
        value = chart.top * step / 4
        parts.append(_text(MARGIN - 6, _up(chart, value) + 4, f"{value:.2f}", "end"))
    parts.append(_text(WIDTH / 2, bottom + 36, chart.across))
    parts.append(_text(MARGIN, MARGIN - 14, chart.up, "start"))
    if chart.level is not None:
        level = _up(chart, chart.level)
        parts.append(f'<path d="M{MARGIN} {level:.1f}H{WIDTH - MARGIN}" stroke="#999" stroke-dasharray="4"/>')
    for number, (name, points) in enumerate(chart.lines.items()):
        parts += _line(chart, name, points, number)
    return (
        f"<h2>{escape(chart.title)}</h2>"
        f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" font-size="12" role="img">{"".join(parts)}</svg>'
    )


def _line(chart: Chart, name: str, points: Seq[Point], number: int) -> list[str]:
    colour = COLOURS[number % len(COLOURS)]
    at = [(_across(chart, x), _up(chart, y)) for x, y in points]
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
    low = HEIGHT + LEGEND * number
    joined = f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"/>'
    return [
        *([] if chart.places else [joined]),
        *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in at),
        f'<rect x="{MARGIN}" y="{low}" width="12" height="12" fill="{colour}"/>',
        _text(MARGIN + 18, low + 11, name, "start"),
    ]


def _across(chart: Chart, x: int) -> float:
    xs = chart.xs
    return MARGIN + (WIDTH - 2 * MARGIN) * (xs.index(x) + 0.5) / len(xs)


def _up(chart: Chart, y: float) -> float:
    return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * y / chart.top


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def require_matplotlib() -> None:
    """Raise `ConfigError` if matplotlib cannot be imported."""
    try:
        import matplotlib.figure  # noqa: F401, PLC0415 - an optional dependency
    except ImportError:
        raise ConfigError(
            "a PNG is drawn by matplotlib, which is not installed: pip install 'slipstream-serve[plots]', or write "
            "--html, which needs nothing"
        ) from None


def write_png(found: Seq[Chart], path: Path) -> None:
    """Draw the charts below each other. Raises `ConfigError` without matplotlib."""
    require_matplotlib()
    from matplotlib.figure import Figure  # noqa: PLC0415 - as above

    figure: Any = Figure(figsize=(8, 4 * len(found)), layout="constrained")
    all_axes = figure.subplots(len(found), squeeze=False)[:, 0]
    for chart, axes in zip(found, all_axes, strict=True):
        for number, (name, points) in enumerate(chart.lines.items()):
            places = [chart.xs.index(x) for x, _ in points]
            axes.plot(
                places,
                [y for _, y in points],
                "o" if chart.places else "o-",
                label=name,
                color=COLOURS[number % len(COLOURS)],
            )
        if chart.level is not None:
            axes.axhline(chart.level, color="#999999", linestyle="--")
        axes.set(title=chart.title, xlabel=chart.across, ylabel=chart.up, ylim=(0, chart.top))
        axes.set_xticks(range(len(chart.xs)), [chart.label(x) for x in chart.xs])
        axes.legend()
    figure.savefig(path)
