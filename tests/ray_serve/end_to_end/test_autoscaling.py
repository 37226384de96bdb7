"""A deployment that grows because the KV cache of its replica is full, though it has few requests."""

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.distributed.deployments import DEPLOY, load
from tests.support.distributed.ray_requests import PROMPTS, streamed
from tests.support.distributed.ray_serving import Cluster, cluster, head_line, on_ports_of, until

pytestmark = [pytest.mark.full, pytest.mark.timeout(0)]
NUM_STREAMS = 4
BLOCKS = 64
"""Of 16 tokens: half of them hold little more than one answer."""


def scaled_by_kv_cache(made: Cluster) -> dict[str, Any]:
    """Return the shipped config with few blocks, and a number of requests that is never reached."""
    config = on_ports_of(made, load(DEPLOY / "serve" / "config.yaml"))
    application = config["applications"][0]
    application["args"] |= {"enforce_eager": True, "num_gpu_blocks_override": BLOCKS}
    (deployment,) = application["deployments"]
    del deployment["num_replicas"]
    deployment["autoscaling_config"] = {
        "min_replicas": 1,
        "max_replicas": 2,
        "target_ongoing_requests": 1000,
        "upscale_delay_s": 0,
        "look_back_period_s": 1,
        "metrics_interval_s": 0.5,
        "policy": {
            "policy_function": "cluster.ray_serve.autoscaling:LoadPolicy",
            "policy_kwargs": {"target_kv_usage": 0.5},
        },
    }
    return config


def test_long_answers_bring_a_second_replica(short_dir: Path) -> None:
    with cluster(short_dir, RAY_AUTH_MODE="disabled") as made:
        made.start(head_line(made), num_cpus=8)
        made.deploy(scaled_by_kv_cache(made))
        assert len(made.replicas()) == 1
        enough = threading.Event()

        def ask(prompt: str) -> None:
            while not enough.is_set():
                assert streamed(made.url, prompt, lambda: None).finish_reason == "length"

        threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in PROMPTS[:NUM_STREAMS]]
        for thread in threads:
            thread.start()
        try:
            until(lambda: len(made.replicas()) == 2, "a second replica")
        finally:
            enough.set()
            for thread in threads:
                thread.join()
