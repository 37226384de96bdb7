"""`slipstream serve` as a process: readiness, signals, and no leaked processes."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cluster.serving.frontend import bound
from cluster.serving.startup_info import described, served_names
from protos.config.engine import EngineConfig, ModelConfig, SpeculativeConfig
from protos.errors import ConfigError
from protos.messages import WorkerInfo
from tests.support.serving import fake_engine
from tests.support.serving.server_process import Running

ROOT = Path(__file__).parents[2]
LONG = 200_000
SERVE = """
import sys
sys.path[:0] = {path!r}
from tests.support.serving import fake_engine
from cluster import channels
from cluster.serving import service
from cluster.serving.http_server import HttpOptions
from protos.config.engine import EngineConfig, ModelConfig
from runtime.subprocess import python_command
service.load_tokenizer = lambda config: fake_engine.tokenizer()
channels.python_command = lambda module: python_command("tests.support.serving.fake_engine")
config = EngineConfig(ModelConfig({model!r}, max_model_len={length}))
service.serve(config, service.ServiceOptions("1", HttpOptions("127.0.0.1", 0), None, grace_s=60))
"""


@contextlib.contextmanager
def running(model: str = "fake") -> Iterator[Running]:
    code = SERVE.format(path=[str(ROOT)], model=model, length=LONG)
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as process:
        try:
            yield Running(process)
        finally:
            process.kill()


def body(max_tokens: int) -> dict[str, object]:
    return {"prompt": "on and on", "max_tokens": max_tokens, "stream": True}


def test_answers_in_flight_end_before_the_server_does() -> None:
    with running() as server:
        with httpx.stream("POST", server.url() + "/v1/completions", json=body(3000), timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert rest[-2:] == ["data: [DONE]", ""]
        code, log = server.ended()
        assert code == 0
        assert "stopping" in log
        assert "Traceback" not in log


def test_a_second_signal_stops_at_once() -> None:
    with running() as server:
        with httpx.stream("POST", server.url() + "/v1/completions", json=body(LONG // 2), timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGINT)
            server.until("stopping")
            server.process.send_signal(signal.SIGINT)
            with contextlib.suppress(httpx.RemoteProtocolError):
                assert "data: [DONE]" not in list(lines)[:-2] or "error" in "".join(lines)
        code, log = server.ended()
        assert code == 0
        assert "Traceback" not in log


def test_an_engine_that_is_gone_for_good_ends_the_server() -> None:
    with running() as server:
        url = server.url() + "/v1/completions"
        with httpx.stream("POST", url, json=body(LONG // 2), timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            with contextlib.suppress(httpx.TransportError):  # it may stop listening before it is answered
                dead = httpx.post(url, json={"prompt": fake_engine.POISON, "max_tokens": 5}, timeout=60)
                assert (dead.status_code, dead.json()["error"]["code"]) == (503, "engine_dead")
            assert '"code":"engine_dead"' in "".join(lines).replace(" ", "")
        code, log = server.ended()
        assert code == 1
        assert log.strip().splitlines()[-1].endswith("EngineDeadError: the engine process ended (exit code 9)")


def test_a_signal_while_loading() -> None:
    with running("hang") as server:
        server.until("hanging")
        server.process.send_signal(signal.SIGTERM)
        code, log = server.ended()
        assert code == 0
        assert "Traceback" not in log


def test_a_model_that_cannot_be_loaded() -> None:
    with running("refuse") as server:
        code, log = server.ended()
        assert code == 1
        assert log.strip().endswith("ModelError: there is no such model")


def test_a_taken_port_is_told_before_anything_is_loaded() -> None:
    with bound("127.0.0.1", 0) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port} .*choose another"),
            bound("127.0.0.1", port),
        ):
            pass


def test_names_and_description(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert served_names(EngineConfig(ModelConfig(str(folder)))) == ("my-model",)
    assert served_names(EngineConfig(ModelConfig("org/model"))) == ("org/model",)
    assert served_names(EngineConfig(ModelConfig("org/model"), served_model_name=("a", "b"))) == ("a", "b")
    drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=5, disable_by_batch_size=8)
    info = WorkerInfo(100, 16, 512, 300)
    lines = described(EngineConfig(ModelConfig("m"), speculative=drafts), info)
    assert lines[-1] == "speculation: ngram, K = 5"
    assert described(EngineConfig(ModelConfig("m")), info)[-1] == "speculation: off"
