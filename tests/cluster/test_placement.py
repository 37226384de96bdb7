"""The bundles of a replica: what they request, and how near each other they are."""

from typing import Any

import pytest

from cluster.ray.placement import BundleLayout, check_nodes, cpus_needed, fits, layout
from cluster.settings import engine_config
from protos.errors import ConfigError, PlacementError
from protos.worker_messages import WorkerId

WORKERS = [WorkerId("target", 0), WorkerId("target", 1), WorkerId("draft")]


def config_of(**given: Any) -> Any:
    return engine_config({"model": "m", **given})


def test_bundles_follow_from_the_configuration() -> None:
    draft = {"model": "d", "num_speculative_tokens": 3}
    gpus, cpus = {"CPU": 64.0, "GPU": 8.0}, {"CPU": 4.0}
    config = config_of(tensor_parallel_size=2, speculative_config=draft)
    found = layout(config, gpus).bundles, layout(config, cpus).bundles
    assert found == ([{"CPU": 1.0}, *[{"CPU": 1.0, "GPU": 1.0}] * 3], [{"CPU": 1.0}] * 4)
    places = [layout(config, gpus).bundle_of(worker) for worker in WORKERS]
    assert (places, cpus_needed(config)) == ([1, 2, 3], 4)
    together = {**draft, "placement": "colocated"}
    assert len(layout(config_of(tensor_parallel_size=2, speculative_config=together), gpus).bundles) == 3
    shared, apart = {"worker_resources": {"GPU": 0.5}}, {**draft, "placement": "dedicated"}
    assert layout(config_of(device="cpu", **shared), gpus).worker == shared["worker_resources"]
    wide = {"worker_resources": {"CPU": 4}}
    assert layout(config_of(**wide), cpus).worker == layout(config_of(device="cpu", **wide), gpus).worker == {"CPU": 4}
    with pytest.raises(PlacementError, match=r'has no GPU: .* add "GPU": 1'):
        layout(config_of(device="auto", **wide), gpus)
    with pytest.raises(ConfigError, match=r"'GPU': 0\.5} lets 2 target ranks share GPUs, which NCCL does not allow"):
        layout(config_of(tensor_parallel_size=2, **shared), gpus)
    assert layout(config_of(**shared), gpus).worker == {"GPU": 0.5}
    with pytest.raises(ConfigError, match=r"lets the target and the draft worker share a GPU, and each would take"):
        layout(config_of(speculative_config=apart, **shared), gpus)
    assert layout(config_of(speculative_config=apart, kv_cache_memory_bytes=1 << 30, **shared), gpus).has_draft
    with pytest.raises(PlacementError, match="device is cuda, and the Ray cluster has no GPU"):
        layout(config_of(tensor_parallel_size=2, device="cuda"), cpus)


def test_bundles_must_be_as_near_as_was_asked() -> None:
    def plan(strategy: str) -> BundleLayout:
        return BundleLayout(2, has_draft=True, worker={"CPU": 1.0}, strategy=strategy)

    check_nodes(["a", "b", "b", "c"], plan("PACK"))
    with pytest.raises(PlacementError, match="the 2 target ranks were placed on 2 nodes"):
        check_nodes(["a", "a", "b", "b"], plan("PACK"))
    check_nodes(["a", "a", "b", "b"], plan("SPREAD"))
    with pytest.raises(PlacementError, match="everything was placed on one node"):
        check_nodes(["a"] * 4, plan("SPREAD"))
    assert fits(plan("PACK"), [{"CPU": 2.0}, {"CPU": 2.0}])
    assert not fits(plan("STRICT_PACK"), [{"CPU": 2.0}, {"CPU": 2.0}])
