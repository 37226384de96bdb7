"""The engine's metrics as Python objects, with the names and types of vLLM's `LLM.get_metrics`."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.samples import Sample

from protos.stats import EngineStats
from runtime.metrics.metric_families import OwnCollector, PrefixCollector, SharedCollector

POSITION = "position"


@dataclass(frozen=True)
class Metric:
    """A metric; `labels` are those of its Prometheus sample."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True)
class Counter(Metric):
    """A number that only grows."""

    value: float


@dataclass(frozen=True)
class Vector(Metric):
    """Counters by position in a draft."""

    values: list[float]


@dataclass(frozen=True)
class Gauge(Metric):
    """A number now."""

    value: float


@dataclass(frozen=True)
class Histogram(Metric):
    """`buckets` maps an upper bound, as text, to the number of values up to it."""

    count: float
    sum: float
    buckets: dict[str, float]


def snapshot(stats: Callable[[], EngineStats], model_name: str) -> list[Metric]:
    """Return the metrics of an engine: under vLLM's names those it has, too, the others as `slipstream_...`."""
    registry, labels = CollectorRegistry(), {"model_name": model_name, "engine": "0"}
    for collector, prefix in ((SharedCollector, "vllm:"), (OwnCollector, "slipstream_")):
        inner = CollectorRegistry()
        inner.register(collector(stats, labels))
        registry.register(PrefixCollector(inner, (prefix,)))
    return [metric for family in registry.collect() for metric in _metrics(family)]


def _metrics(family: Family) -> Iterator[Metric]:
    if family.type == "histogram":
        yield _histogram(family)
    elif family.name.endswith("_per_pos"):
        labels = {key: value for key, value in _labels_of(family).items() if key != POSITION}
        yield Vector(family.name, labels, [sample.value for sample in family.samples])
    else:
        kind = Counter if family.type == "counter" else Gauge
        yield from (kind(family.name, sample.labels, sample.value) for sample in family.samples)


def _labels_of(family: Family) -> dict[str, str]:
    return family.samples[0].labels if family.samples else {}


def _histogram(family: Family) -> Histogram:
    """Return the histogram of a family with one set of labels."""
    named = {sample.name.removeprefix(family.name): sample for sample in family.samples}
    buckets = {sample.labels["le"]: sample.value for sample in _named(family, "_bucket")}
    total = named["_count"]
    return Histogram(family.name, total.labels, total.value, named["_sum"].value, buckets)


def _named(family: Family, ending: str) -> Iterable[Sample]:
    return (sample for sample in family.samples if sample.name == family.name + ending)
