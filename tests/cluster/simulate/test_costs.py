"""Costs of rounds and the predictions from them: arithmetic by hand, files, refusals, plots."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import demo
from cluster.cli import main as cli
from cluster.cli.simulate_costs import measure_costs
from cluster.settings import engine_config
from cluster.simulate import measure as measuring
from cluster.simulate.charts import charts, html, require_matplotlib, write_png
from cluster.simulate.costs import CostTable, draft_key, read_costs
from cluster.simulate.predict import SpeedupPrediction, predict, threshold
from cluster.simulate.results import Replay, ReplayedAnswer
from protos.config.engine import SpeculativeConfig
from protos.errors import ConfigError
from protos.messages import SpeculationStats, Step
from tests.support.models import tiny_pairs

NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
TABLE = CostTable(
    "target",
    "float32",
    {"dtype": "float32"},
    {"processor": "here"},
    {(1, 64): {1: 10.0, 5: 14.0}, (8, 64): {1: 20.0, 5: 60.0}},
    {"ngram": {(1, 64): {4: 1.0}, (8, 64): {4: 5.0}}},
)


def replayed(name: str = "lookup") -> Replay:
    """Four steps, two of them with drafts of four tokens, of which four are accepted in all."""
    steps = [Step(4, 3, 4), Step(), Step(4, 1, 4), Step()]
    stats = SpeculationStats(2, 8, 4, (2, 1, 1, 0))
    return Replay(name, 4, NGRAM, [ReplayedAnswer(0, steps, stats, num_output_tokens=8)], {"greedy": 1})


def test_the_speed_up_is_that_computed_by_hand() -> None:
    one, eight = predict(replayed(), TABLE)
    # 2 tokens of a row are proposed per step, and a step gives 2 tokens.
    assert (one.shape, one.plain_s, one.round_s) == ((1, 64), 10.0, 12.0 + 1.0)
    assert one.speedup == pytest.approx(2 * 10 / 13)
    assert eight.speedup == pytest.approx(2 * 20 / (40 + 5))


def test_the_seconds_are_averaged_over_the_numbers_of_draft_tokens() -> None:
    jump = {1: 10.0, 2: 20.0, 5: 20.0}
    table = replace(
        TABLE, target={(1, 64): jump, (2, 64): jump}, drafts={"ngram": {(1, 64): {4: 0.0}, (2, 64): {4: 0.0}}}
    )
    one, two = predict(replayed(), table)
    assert one.round_s == pytest.approx(0.5 * 10 + 0.5 * 20)  # no draft, or four tokens
    assert two.round_s == pytest.approx(0.25 * 10 + 0.75 * 20)  # 0, 2 or 4 of a row on average


def test_prompts_are_part_of_an_answer() -> None:
    """Four steps of eight tokens, after prompts of 25 tokens on average: half of what one of 50 takes."""
    table = replace(TABLE, prompts={50: 100.0}, draft_prompts={"ngram": {50: 20.0}})
    one = replayed()
    answers = [replace(one.answers[0], num_prompt_tokens=count) for count in (0, 50)]
    found, _ = predict(replace(one, answers=answers), table)
    assert (found.prompt_s, found.draft_prompt_s) == (50.0, 10.0)
    assert found.speedup == pytest.approx((50 + 8 * 10) / (50 + 10 + 4 * (12 + 1)))


def test_prompts_cost_as_much_as_measured_ones_of_their_length() -> None:
    table = replace(TABLE, prompts={64: 1.0, 192: 5.0}, draft_prompts={"ngram": {64: 0.5}})
    assert [table.prompt_s(tokens) for tokens in (0, 32, 64, 128, 192, 384)] == [0.0, 0.5, 1.0, 3.0, 5.0, 10.0]
    assert table.draft_prompt_s("ngram", 128) == 1.0
    assert table.draft_prompt_s("suffix", 128) == 0.0


def test_the_threshold_is_the_last_size_before_the_first_that_does_not_pay() -> None:
    def at(**speedups: float) -> list[SpeedupPrediction]:
        return [SpeedupPrediction("d", 1, (int(rows[1:]), 64), 1.0, 1.0, speedup) for rows, speedup in speedups.items()]

    assert threshold(at(b1=2.0, b2=1.2, b4=0.9, b8=1.1), "d", 64) == "pays up to batch size 2, not at 4"
    assert threshold(at(b1=2.0, b4=1.2), "d", 64) == "pays at every measured batch size, up to 4"
    assert threshold(at(b1=0.9, b4=1.2), "d", 64) == "does not pay at batch size 1, the smallest measured"
    better = replace(at(b4=1.5)[0], k=3)
    assert threshold([*at(b1=2.0, b4=0.9), better], "d", 64) == "pays at every measured batch size, up to 4"


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    table = replace(TABLE, prompts={64: 1.0, 192: 5.0}, draft_prompts={"ngram": {64: 0.5}})
    path.write_text(table.as_json())
    assert read_costs(path) == table


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "cannot read .*costs.json"),
        ("[" * 100_000, "cannot read .*costs.json: it is nested too deeply"),
        ("[]", "is not a table of costs of format 3, but another file"),
        ('{"format": 2}', "is not a table of costs of format 3, but 2: .* measures again"),
        ('{"format": 3}', "is not a table of costs: KeyError"),
        (json.dumps({**json.loads(TABLE.as_json()), "target": []}), "ValueError: 'no rows'"),
        (json.dumps({**json.loads(TABLE.as_json()), "target": [[0, 1, 1, 1.0]]}), "a row is"),
        (json.dumps({**json.loads(TABLE.as_json()), "prompts": [[64, -1.0]]}), "a row is"),
    ],
)
def test_bad_tables(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_costs(path)


def test_nothing_is_predicted_beyond_what_was_measured() -> None:
    with pytest.raises(ConfigError, match="the costs are those of target, the answers those of other"):
        TABLE.check("other", {}, {})
    assert TABLE.check("target", {}, {"processor": "there"}) == ["processor here, here there"]
    assert TABLE.check("target", {"dtype": "bfloat16"}, {}) == ["dtype float32, here bfloat16"]
    assert TABLE.check("target", {"dtype": "float32"}, {"processor": "here"}) == []
    with pytest.raises(ConfigError, match="has no 'suffix' with K = 4, but ngram: measure it again"):
        TABLE.draft_s("suffix", (1, 64), 4)
    with pytest.raises(ConfigError, match="1 to 5 tokens of a row, and 6 are needed"):
        TABLE.target_s((1, 64), 6)


def test_a_draft_is_identified_by_all_that_changes_what_it_costs() -> None:
    draft = SpeculativeConfig(method="draft_model", model="d", num_speculative_tokens=2)
    assert draft_key(draft) == "draft_model d"
    others: list[dict[str, Any]] = [
        {"quantization": "int8"},
        {"draft_kv_window": 64},
        {"dtype": "bfloat16"},
        {"revision": "old"},
        {"eagle_topk": 2},
        {"eagle_topk": 2, "num_steps": 2},
        {"rejection_sample_method": "standard"},
    ]
    lookahead = SpeculativeConfig(method="lookahead", num_speculative_tokens=2)
    keys = [draft_key(draft), *(draft_key(replace(draft, **other)) for other in others)]
    keys += [draft_key(lookahead), draft_key(replace(lookahead, lookahead_window=2)), draft_key(NGRAM)]
    keys += [draft_key(replace(NGRAM, prompt_lookup_min=2))]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "other",
    [
        {"num_speculative_tokens": 5},
        {"policy": "fixed"},
        {"disable_by_batch_size": 4},
        {"num_speculative_tokens_per_batch_size": ((1, 4, 2),)},
        {"placement": "colocated"},
    ],
)
def test_a_draft_costs_the_same_whatever_its_policy(other: dict[str, Any]) -> None:
    draft = SpeculativeConfig(method="draft_model", model="d", num_speculative_tokens=2)
    assert draft_key(replace(draft, **other)) == draft_key(draft)


def test_each_draft_of_a_checkpoint_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    monkeypatch.setattr(measuring, "measure", lambda configs, *_: found.extend(configs))
    draft = {"model": str(demo.pair()[1]), "num_speculative_tokens": 2}
    configs = [engine_config({"speculative_config": {**draft, **more}}) for more in ({}, {"quantization": "int8"}, {})]
    replays = [Replay("d", 2, config.speculative, [], {}) for config in configs if config.speculative]
    measure_costs(replays, configs[0], "1", "64")
    assert [config.speculative.quantization for config in found] == [None, "int8"]


# The command, with the tiny pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tiny_pairs.build(tmp_path_factory.mktemp("pair"), "llama")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps({"prompt": [5, 6, 7, 5, 6], "output": [7, 5, 6, 9]}) + "\n")
    return path


def simulate(log: Path, pair: tuple[Path, Path], *given: str) -> None:
    drafts = [{"model": str(pair[1]), "name": "<tiny>"}, {"method": "ngram", "prompt_lookup_min": 2}]
    options = [word for draft in drafts for word in ("--draft", json.dumps(draft))]
    common = ["--model", str(pair[0]), "--k", "1,2", "--dtype", "float32", "--max-model-len", "64", "--enforce-eager"]
    cli.app(["simulate", str(log), *options, *common, *given], standalone_mode=False)


SIZES = ["--batch-sizes", "1,2", "--contexts", "16,500"]


def test_costs_are_measured_once_and_used_again(
    log: Path, pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    costs, page, figures = (tmp_path / name for name in ("costs.json", "page.html", "figures.json"))
    simulate(log, pair, "--target", "--costs", str(costs), *SIZES, "--html", str(page), "--json", str(figures))
    shown = capsys.readouterr()
    assert "2 rows of 500 tokens do not fit" in shown.err
    table = read_costs(costs)
    assert table.shapes == [(1, 16), (2, 16)]
    assert sorted(table.target[2, 16]) == [1, 2, 3]
    assert all(seconds > 0 for by_k in table.drafts[f"draft_model {pair[1]}"].values() for seconds in by_k.values())
    assert table.prompts.keys() == {16}
    assert table.draft_prompts.keys() == table.drafts.keys()
    assert "best K by batch size: " in shown.out
    assert "WARNING" not in shown.out
    found = json.loads(figures.read_text())
    assert len(found["predictions"]) == 2 * 2 * 2  # drafts, Ks, shapes

    monkeypatch.setattr(measuring, "measure", None)
    monkeypatch.setattr(measuring, "machine", lambda: {"processor": "another"})
    given = ["--kv-cache-dtype", "int8", "--quantization", "int8", "--costs", str(costs), "--json", str(figures)]
    simulate(log, pair, *given)
    shown = capsys.readouterr().out
    warning = (
        "WARNING: the costs were measured otherwise: quantization as stored, here int8; KV cache auto, here int8; "
    )
    assert warning + "processor " in shown
    again = json.loads(figures.read_text())
    assert again["predictions"] == found["predictions"]
    assert "WARNING" in again["notes"][-1]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--costs", "/nowhere.json"], "there is no /nowhere.json: give --target to measure"),
        (["--costs", "/nowhere/x.json", "--target"], "there is no folder /nowhere"),
        (["--costs", "x.json", "--target", "--contexts", "0"], "contexts must be numbers from 1 on"),
        (["--costs", "{}/x.json", "--target", "--contexts", "500"], "nothing was measured: no batch of 1 rows of 500"),
        (["--html", "/nowhere/x.html"], "there is no folder /nowhere"),
    ],
)
def test_refusals(log: Path, pair: tuple[Path, Path], given: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        simulate(log, pair, *(word.format(log.parent) for word in given))


# Plots


def test_the_page_is_complete_in_itself() -> None:
    replays = [replayed("<a> & b"), replayed("other")]
    predictions = [each for one in replays for each in predict(one, TABLE)]
    page = html(charts(replays, predictions), replays, ["a <note>"])
    assert not re.search(r"(src|href)=|url\(|<script", page)
    assert "&lt;a&gt; &amp; b" in page
    assert "<a>" not in page
    assert "a &lt;note&gt;" in page
    depth, speedup = (ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page))
    assert [len(found.findall("polyline")) for found in (depth, speedup)] == [2, 2]
    first = speedup.findall("polyline")[0].get("points") or ""
    (x1, y1), (x2, y2) = (map(float, point.split(",")) for point in first.split())
    assert x1 < x2
    assert y1 < y2  # downwards in SVG: the speed-up falls with the batch size


def test_without_costs_there_is_only_acceptance() -> None:
    assert [chart.title for chart in charts([replayed()], [])] == ["Acceptance by depth"]


def test_without_matplotlib_a_png_is_refused_before_anything_is_loaded(
    log: Path, pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'slipstream-serve[plots]'")):
        simulate(log, pair, "--png", str(tmp_path / "x.png"))


def test_a_png_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    require_matplotlib()
    path = tmp_path / "x.png"
    write_png(charts([replayed()], predict(replayed(), TABLE)), path)
    assert path.read_bytes().startswith(b"\x89PNG")
