"""Dashboards, alerts and scrape configurations parse, and use only metrics that the server publishes."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from protos.stats import EngineStats, PhaseTimes
from runtime.metrics.prometheus import Metrics

ROOT = Path(__file__).parents[2] / "cluster" / "deploy"
DASHBOARDS = sorted((ROOT / "grafana" / "dashboards").glob("*.json"))
RULES = ROOT / "prometheus" / "rules.yaml"
NAME = re.compile(r"\b(?:ray_)?(slipstream_\w+|vllm:\w+)")
LABELS = re.compile(r"\b(slipstream_\w+)\{([^}]*)\}")


def published() -> tuple[set[str], dict[str, set[str]]]:
    """Return the names of all samples of a server, and the labels of each."""
    stats = EngineStats(
        accepted_per_pos=(1,),
        draft_changes={"lost": 1},
        speculation_changes={"batch_size_rose": 1},
        phases=PhaseTimes(1.0),
    )
    metrics = Metrics("m", lambda: stats)
    metrics.answered("GET", "/", 200)
    labels: dict[str, set[str]] = {}
    for line in metrics.render().decode().splitlines():
        found = re.match(r"([\w:]+)(?:\{(.*)\})? ", line)
        if found and not line.startswith("#"):
            labels.setdefault(found[1], set()).update(re.findall(r'(\w+)="', found[2] or ""))
    return set(labels), labels


def panels(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels", ())


def expressions() -> list[str]:
    found = [
        target["expr"]
        for path in DASHBOARDS
        for panel in panels(json.loads(path.read_text(encoding="utf-8")))
        for target in panel.get("targets", ())
    ]
    rules = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    recorded = [rule for group in rules["groups"] for rule in group["rules"]]
    found += [rule["expr"] for rule in recorded]
    own = {rule["record"] for rule in recorded if "record" in rule}
    return [re.sub("|".join(map(re.escape, own)), "", expression) for expression in found]


def test_only_what_is_published_is_asked_for() -> None:
    names, labels = published()
    asked = 0
    for expression in expressions():
        found = NAME.findall(expression)
        assert set(found) <= names, expression
        asked += len(found)
        for name, selector in LABELS.findall(expression):
            assert set(re.findall(r"(\w+)(?:=~|!~|!=|=)", selector)) <= labels[name], expression
        by = {label.strip() for some in re.findall(r"\bby \(([^)]*)\)", expression) for label in some.split(",")}
        assert by <= {label for name in found for label in labels[name]} | {"instance", "model_name"}, expression
    assert asked > 50


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_can_be_moved(path: Path) -> None:
    dashboard = json.loads(path.read_text(encoding="utf-8"))
    assert dashboard["uid"] == "slipstream-serving", "links to it must go on working"
    variables = {variable["name"]: variable["type"] for variable in dashboard["templating"]["list"]}
    assert variables["datasource"] == "datasource"
    everything = list(panels(dashboard))
    ids = [panel["id"] for panel in everything]
    assert len(ids) == len(set(ids))
    for panel in everything:
        for target in panel.get("targets", ()):
            assert target["datasource"] == {"type": "prometheus", "uid": "$datasource"}, panel["title"]
    drawn = [panel["gridPos"] for panel in everything]
    for place, one in enumerate(drawn):
        assert one["x"] + one["w"] <= 24
        for other in drawn[place + 1 :]:
            apart = (
                one["x"] + one["w"] <= other["x"]
                or other["x"] + other["w"] <= one["x"]
                or one["y"] + one["h"] <= other["y"]
                or other["y"] + other["h"] <= one["y"]
            )
            assert apart, (one, other)


def test_the_other_files_agree_with_what_is_deployed() -> None:
    provider = yaml.safe_load((ROOT / "grafana/provisioning/dashboards.yaml").read_text(encoding="utf-8"))
    assert provider["providers"][0]["type"] == "file"
    source = yaml.safe_load((ROOT / "grafana/provisioning/datasources.yaml").read_text(encoding="utf-8"))
    assert source["datasources"][0]["type"] == "prometheus"
    prometheus = yaml.safe_load((ROOT / "prometheus/prometheus.yaml").read_text(encoding="utf-8"))
    assert prometheus["rule_files"] == [RULES.name]
    jobs = {job["job_name"]: job for job in prometheus["scrape_configs"]}
    assert jobs["slipstream"]["metrics_path"] == "/metrics"
    assert jobs["slipstream"]["static_configs"][0]["targets"] == ["localhost:8000"], "the port of `slipstream serve`"
    monitor = yaml.safe_load((ROOT / "prometheus/podmonitor.yaml").read_text(encoding="utf-8"))
    port = monitor["spec"]["podMetricsEndpoints"][0]["port"]
    services = list((ROOT / "kuberay").rglob("rayservice.yaml"))
    assert services
    for path in services:
        assert f"name: {port}, containerPort" in path.read_text(encoding="utf-8"), path
