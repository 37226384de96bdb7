"""A replica's figures in Ray's metrics: every sample, and (in full) as Ray itself exports them."""

import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from cluster.ray.metrics import RayMetrics
from protos.stats import EngineStats
from runtime.metrics.prometheus import Metrics

LABELS = ("model_name", "engine")


@dataclass
class Noted:
    """A gauge that records its values."""

    labels: tuple[str, ...]
    values: dict[tuple[str, ...], float] = field(default_factory=dict)

    def set(self, value: float, tags: dict[str, str] | None = None) -> None:
        assert tags is not None
        assert tuple(tags) == self.labels, "Ray wants exactly the labels a gauge was made with"
        self.values[tuple(tags.values())] = value


def test_every_sample_is_copied_once_under_our_name() -> None:
    made: dict[str, Noted] = {}

    def make(name: str, text: str, labels: tuple[str, ...]) -> Noted:
        assert name not in made
        assert text
        made[name] = Noted(labels)
        return made[name]

    stats = EngineStats(num_running=3, accepted_per_pos=(10, 8))
    metrics = Metrics("m", lambda: stats)
    mirror = RayMetrics(metrics, make)
    mirror.copy()
    stats = EngineStats(num_running=5, accepted_per_pos=(20, 15, 1))
    mirror.copy()
    assert made["slipstream_num_requests_running"].values == {("m", "0"): 5}
    per_position = made["slipstream_spec_decode_num_accepted_tokens_per_pos_total"]
    assert per_position.labels == (*LABELS, "position")
    assert per_position.values == {("m", "0", "0"): 20, ("m", "0", "1"): 15, ("m", "0", "2"): 1}
    assert "le" in made["slipstream_time_to_first_token_seconds_bucket"].labels
    assert all(name.startswith("slipstream_") for name in made)
    text = metrics.render().decode().splitlines()
    assert sum(len(gauge.values) for gauge in made.values()) == sum(line.startswith("slipstream_") for line in text)


@pytest.mark.full
def test_ray_exports_them(ray_cluster: Any) -> None:
    import ray

    @ray.remote(num_cpus=0)
    class Replica:
        def copy(self) -> None:
            stats = EngineStats(num_running=7)
            self.mirror = RayMetrics(Metrics("mirrored", lambda: stats))
            self.mirror.copy()

    replica = Replica.remote()
    ray.get(replica.copy.remote())
    node = ray.nodes()[0]
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    until = time.monotonic() + 120
    lines: list[str] = []
    while not lines and time.monotonic() < until:
        time.sleep(1)
        lines = [
            line
            for line in httpx.get(address).text.splitlines()
            if line.startswith("ray_slipstream_num_requests_running{") and 'model_name="mirrored"' in line
        ]
    ray.kill(replica)
    assert lines
    assert lines[0].endswith(" 7.0")
