"""`slipstream serve` with its controller on Ray: it answers, stops on request, and fails if its engine dies."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.ray.cluster import available_resources
from slipstream import LLM, SamplingParams
from tests.support.models import tiny_pairs
from tests.support.processes import wait_gone, wait_until
from tests.support.serving.server_process import Running

ROOT = Path(__file__).parents[2]
SMALL: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "num_gpu_blocks_override": 128}
FLAGS = ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--num-gpu-blocks-override", "128"]
FLAGS += ["--spare-workers", "0"]
PROMPT, LENGTH = "once upon a time", 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_pairs.build(tmp_path_factory.mktemp("pair"), "llama")[0]


@pytest.fixture
def server(ray_cluster: Any, model: Path) -> Iterator[Running]:
    """Serve two target ranks over HTTP; afterwards their resources are free again."""
    free = available_resources()["GPU"]
    command = [sys.executable, "-m", "slipstream", "serve", str(model), "-tp", "2", "--port", "0", *FLAGS]
    address = ray_cluster.get_runtime_context().gcs_address
    environment = {**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield Running(process)
        finally:
            process.kill()
    wait_until(lambda: available_resources().get("GPU") == free)


MEMBER = """
import signal
import time
from cluster.ray.cluster import Membership

stopping = []
signal.signal(signal.SIGTERM, lambda number, frame: stopping.append(number))
member = Membership(1)
print("joined", flush=True)
while not stopping:
    time.sleep(0.05)
time.sleep(3.5)  # Ray's own handler would abort the process after three seconds
member.leave()
"""


def test_a_member_of_a_cluster_handles_sigterm_itself(ray_cluster: Any) -> None:
    address = ray_cluster.get_runtime_context().gcs_address
    environment = {**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": str(ROOT)}
    environment.pop("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", None)  # importing `cluster.ray` in this process has set it
    command = [sys.executable, "-c", MEMBER]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "joined\n"
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
    assert (process.returncode, log) == (0, "")


def body(**fields: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True, **fields}


def pids_of_replica(ray_cluster: Any) -> list[int]:
    """Return the process ids of the one replica that another process has started, the controller's first."""
    ours = ray_cluster.get_runtime_context().namespace
    named = ray_cluster.util.list_named_actors(all_namespaces=True)
    theirs = sorted((actor for actor in named if actor["namespace"] != ours), key=lambda actor: actor["name"])
    actors = [ray_cluster.get_actor(actor["name"], actor["namespace"]) for actor in theirs]
    return [ray_cluster.get(actor.location.remote(), timeout=10).pid for actor in actors]


@pytest.mark.full
def test_it_answers_and_stops_when_told(ray_cluster: Any, server: Running, model: Path) -> None:
    with LLM(str(model), **SMALL) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
        wanted = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text
    url = server.url()
    answer = httpx.post(url + "/v1/completions", json=body(), timeout=60)
    assert answer.json()["choices"][0]["text"] == wanted
    pids = pids_of_replica(ray_cluster)
    assert len(pids) == 3
    server.process.send_signal(signal.SIGTERM)
    code, log = server.ended()
    assert code == 0
    assert [line.split(maxsplit=2)[2] for line in log.splitlines()] == [
        "stopping; running answers have 30 s, a second signal stops at once",
        "stopped",
    ]
    wait_gone(pids)


@pytest.mark.full
def test_it_ends_with_an_error_when_its_controller_is_gone(ray_cluster: Any, server: Running) -> None:
    url = server.url() + "/v1/completions"
    pids = pids_of_replica(ray_cluster)
    with httpx.stream("POST", url, json=body(max_tokens=230, stream=True), timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(pids[0], signal.SIGKILL)
        rest = "".join(lines)
    assert "engine_dead" in rest
    code, log = server.ended()
    assert code == 2
    assert "slipstream: error: the controller is gone: its process ended" in log
    with contextlib.suppress(httpx.TransportError):
        assert httpx.post(url, json=body(), timeout=5).status_code == 503
    wait_gone(pids)
