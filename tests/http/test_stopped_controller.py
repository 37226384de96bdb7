"""`slipstream serve` whose controller is stopped (SIGSTOP): noticed, reported, survived, and in the end given up."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from protos import slipstream_v1_pb2_grpc as stubs
from runtime.grpc.health import SERVICE
from tests.support.processes import wait_gone, wait_until
from tests.support.serving import fake_engine
from tests.support.serving.grpc_checks import NOT_SERVING, SERVING, Code, checked, failure
from tests.support.serving.grpc_server import request
from tests.support.serving.server_process import Running

ROOT = Path(__file__).parents[2]
LONG = 2_000_000
SERVE = """
import sys
sys.path[:0] = {path!r}
from tests.support.serving import fake_engine
from cluster import channels
from cluster.serving import service, setup
from cluster.serving.grpc_server import GrpcOptions
from cluster.serving.http_server import HttpOptions
from protos.config.engine import EngineConfig, ModelConfig
from runtime.frontend import delivery
from runtime.subprocess import python_command

setup.load_tokenizer = lambda config: fake_engine.tokenizer()
channels.python_command = lambda module: python_command("tests.support.serving.fake_engine")
{before}
config = EngineConfig(ModelConfig("fake", max_model_len={length}))
http, grpc = HttpOptions("127.0.0.1", 0), GrpcOptions("127.0.0.1", 0)
service.serve(config, service.ServiceOptions("1", http, grpc, grace_s=1))
"""
QUICK = """
from runtime.frontend.silence import SilenceLimits
delivery.SILENCE_LIMITS = SilenceLimits(stalled_s=2.0, given_up_s={given_up_s})
"""
NOTICED_S = 10.0
GIVEN_UP_S = 40.0


@dataclass(frozen=True)
class Stoppable:
    """A server, and its controller's process."""

    server: Running
    url: str
    channel: grpc.Channel
    controller: int

    def health(self) -> httpx.Response:
        return httpx.get(self.url + "/health", timeout=5)

    def is_healthy(self) -> bool:
        return self.health().status_code == 200

    def ask(self, **options: Any) -> httpx.Response:
        body = {"prompt": "hello", "max_tokens": 8, **options}
        return httpx.post(self.url + "/v1/completions", json=body, timeout=60)

    def stop(self) -> None:
        os.kill(self.controller, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.controller, signal.SIGCONT)


@contextlib.contextmanager
def stoppable(before: str = "") -> Iterator[Stoppable]:
    code = SERVE.format(path=[str(ROOT)], length=LONG, before=before)
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as process:
        server = Running(process)
        try:
            line = server.until("ready on")
            found = re.search(r"(http://[\d.:]+), gRPC on ([\d.:]+)", line)
            assert found is not None, line
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            with grpc.insecure_channel(found[2]) as channel:
                yield Stoppable(server, found[1], channel, int(children[0]))
        finally:
            process.kill()


def notices_and_continues(running: Stoppable) -> None:
    """Stop the controller below two streams; it is noticed, and once it continues everything is served again."""
    calls = stubs.GenerationServiceStub(running.channel)
    body = {"prompt": "on and on", "max_tokens": LONG // 2, "stream": True}
    with httpx.stream("POST", running.url + "/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        call = calls.Generate(request("on and on", LONG // 2))
        next(call)
        began = time.monotonic()
        running.stop()
        waiting = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        assert time.monotonic() - began < NOTICED_S
    assert waiting[-1]["error"]["code"] == "engine_stalled"
    failed = failure(lambda: list(call), Code.UNAVAILABLE)
    assert "has sent nothing" in failed.details()
    assert time.monotonic() - began < NOTICED_S
    health = running.health()
    assert health.status_code == 503
    assert health.json()["error"]["code"] == "engine_stalled"
    assert "has sent nothing" in health.json()["error"]["message"]
    refused = running.ask()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_stalled")
    assert int(refused.headers["retry-after"]) >= 1
    wait_until(lambda: checked(running.channel, SERVICE) == NOT_SERVING)  # it follows the engine's state every 0.1 s
    refused_call = failure(lambda: list(calls.Generate(request("x", 4))), Code.UNAVAILABLE)
    assert "grpc-retry-pushback-ms" in dict(refused_call.trailing_metadata())
    running.resume()
    wait_until(running.is_healthy)
    wait_until(lambda: checked(running.channel, SERVICE) == SERVING)
    assert running.ask().json()["choices"][0]["text"] == fake_engine.expected("hello", 8)
    counted = 'slipstream_requests_turned_away_total{engine="0",model_name="fake",reason="engine_stalled"} 4.0'
    assert counted in httpx.get(running.url + "/metrics", timeout=5).text.splitlines()  # two dropped, two refused


def is_given_up(running: Stoppable) -> None:
    """Stop the controller for good: the server ends with it, and its supervisor may start another."""
    running.stop()
    wait_gone([running.controller], GIVEN_UP_S)
    code, log = running.server.ended()
    assert code != 0
    assert "did not continue" in log


def test_a_stopped_controller_is_noticed_and_continues() -> None:
    with stoppable(QUICK.format(given_up_s=60.0)) as running:
        notices_and_continues(running)


def test_a_controller_that_stays_stopped_ends_the_server() -> None:
    with stoppable(QUICK.format(given_up_s=3.0)) as running:
        is_given_up(running)


@pytest.mark.full
def test_a_stopped_controller_is_noticed_within_ten_seconds() -> None:
    with stoppable() as running:
        notices_and_continues(running)
        is_given_up(running)
