"""The report of `slipstream bench compare`, and its `--methods`."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from cluster.bench import compare_report
from cluster.bench.compared import BlockFigures, ComparedMethod
from cluster.bench.ratios import Ratio
from cluster.check.answers import DraftCounts
from cluster.cli.compare import named_methods
from cluster.simulate import charts
from protos.config.engine import SpeculativeConfig


def figures(seconds: Sequence[float], steps: int = 4) -> tuple[BlockFigures, ...]:
    return tuple(BlockFigures(8, steps, each) for each in seconds)


COMPARED = ComparedMethod(
    "a|b",
    SpeculativeConfig(method="ngram", num_speculative_tokens=2),
    ("x", "y", "x"),
    figures([2.0, 2.0, 4.0], 8),
    figures([1.0, 2.0, 1.0]),
    None,
    DraftCounts(4, 2),
)


def test_the_speedup_is_a_ratio_of_rates_with_its_interval() -> None:
    found = COMPARED.speedup("x")
    assert (found.value, found.low, found.high) == (pytest.approx(3.0), pytest.approx(2.0), pytest.approx(4.0))
    assert COMPARED.speedup().value == pytest.approx(2.0)
    assert COMPARED.mean_speedup("x") == pytest.approx(8 / 3)  # (8 + 8) / 2 over (4 + 2) / 2 tokens per second
    assert COMPARED.speedup("y") == Ratio(1.0, 1.0, 1.0)
    assert (COMPARED.accepted(), COMPARED.accepted("y")) == (2.0, 2.0)


def test_the_tables_are_markdown_of_even_width() -> None:
    lines = compare_report.markdown(compare_report.speedups([COMPARED]))
    assert len({len(line) for line in lines}) == 1
    assert [cell.strip() for cell in lines[3].split(" | ")] == [
        r"| a\|b",
        "3.00 (2.00 - 4.00)",
        "1.00",
        "2.00 (1.00 - 4.00) |",
    ]
    assert re.fullmatch(r"(\|-+){4}\|", lines[1])


def test_a_png_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    charts.write_png([compare_report.chart([COMPARED])], path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_methods_are_names_paths_and_json(tmp_path: Path) -> None:
    (tmp_path / "a=b").mkdir()
    given = [
        f"ngram, suffix,{tmp_path}",
        f"{tmp_path}/a=b,mine={tmp_path},other=org/draft",
        '{"method": "ngram", "name": "x"}',
        'tree={"model": "m", "eagle_topk": 2}',
        "my.module:Class",
    ]
    assert list(named_methods(given)) == [
        {"method": "ngram"},
        {"method": "suffix"},
        {"model": str(tmp_path)},
        {"model": f"{tmp_path}/a=b"},
        {"model": str(tmp_path), "name": "mine"},
        {"model": "org/draft", "name": "other"},
        {"method": "ngram", "name": "x"},
        {"model": "m", "eagle_topk": 2, "name": "tree"},
        {"method": "my.module:Class"},
    ]
