"""`slipstream serve` as a process: readiness, signals, and no leaked processes."""

import contextlib
import json
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cluster.serving.frontend import bound, listen
from cluster.serving.startup_info import curl_hint, described, served_names
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
from cluster.serving import service, setup
from cluster.serving.http_server import HttpOptions
from protos.config.engine import EngineConfig, ModelConfig
from runtime.subprocess import python_command

def load_tokenizer(config):
    {before}
    return fake_engine.tokenizer()
setup.load_tokenizer = load_tokenizer
channels.python_command = lambda module: python_command("tests.support.serving.fake_engine")
config = EngineConfig(ModelConfig({model!r}, max_model_len={length}))
service.serve(config, service.ServiceOptions("1", HttpOptions("127.0.0.1", 0), None, grace_s=60))
"""


@contextlib.contextmanager
def running(model: str = "fake", before: str = "pass") -> Iterator[Running]:
    """Serve the fake *model*; *before* is run before its tokenizer is loaded."""
    code = SERVE.format(path=[str(ROOT)], model=model, length=LONG, before=before)
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


NO_TOKENIZER = "import time; time.sleep({}); from protos.errors import ModelError; raise ModelError('no tokenizer')"


@pytest.mark.parametrize(
    ("model", "seconds", "error"),
    [("refuse", 0, "no tokenizer"), ("refuse", 3, "there is no such model"), ("hang", 0, "no tokenizer")],
)
def test_the_first_of_two_errors_while_loading_is_the_only_one(model: str, seconds: int, error: str) -> None:
    with running(model, NO_TOKENIZER.format(seconds)) as server:
        code, log = server.ended()
        assert code == 1
        assert log.strip().endswith(f"ModelError: {error}")
        assert "never retrieved" not in log


@pytest.mark.parametrize(
    ("is_chat", "has_key", "path"), [(False, False, "/v1/completions"), (True, True, "/v1/chat/completions")]
)
def test_the_printed_command_fits_the_model(is_chat: bool, has_key: bool, path: str) -> None:
    command = curl_hint("https://[::1]:81", "it's/mine", is_chat=is_chat, has_key=has_key)
    _, url, _, kind, *key, data, body = shlex.split(command)
    assert (url, kind, data) == (f"https://[::1]:81{path}", "Content-Type: application/json", "-d")
    assert key == (["-H", "Authorization: Bearer $SLIPSTREAM_API_KEY"] if has_key else [])
    assert ("messages" in json.loads(body), json.loads(body)["model"]) == (is_chat, "it's/mine")


@pytest.mark.parametrize(
    ("before", "path"), [("pass", "/chat/completions"), ("fake_engine.TEMPLATE = None", "/completions")]
)
def test_the_printed_command_is_answered(before: str, path: str) -> None:
    with running(before=before) as server:
        url = server.url()
        command = shlex.split(server.until("curl "))
        assert command[1] == f"{url}/v1{path}"
        assert httpx.post(command[1], json=json.loads(command[-1]), timeout=60).status_code == 200


def test_a_taken_port_is_told_before_anything_is_loaded() -> None:
    with bound("127.0.0.1", 0) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port} .*choose another"),
            bound("127.0.0.1", port),
        ):
            pass


def test_of_two_servers_started_at_once_one_is_told_before_it_loads() -> None:
    """Both loaded, and one of them failed then: a socket that does not listen kept nobody out."""
    with bound("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port} "), bound("127.0.0.1", port):
            pass


def test_a_port_can_be_had_again_at_once_though_its_connections_linger() -> None:
    with bound("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        listen(listener, 8)
        with socket.create_connection(("127.0.0.1", port)) as client:
            listener.accept()[0].close()  # who closes first waits a minute
            client.recv(1)
    with bound("127.0.0.1", port) as first, bound("127.0.0.1", port) as second:
        listen(first, 8)
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port} "):
            listen(second, 8)


def test_names_and_description(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert served_names(EngineConfig(ModelConfig(str(folder)))) == ("my-model",)
    assert served_names(EngineConfig(ModelConfig("org/model"))) == ("org/model",)
    assert served_names(EngineConfig(ModelConfig("org/model"), served_model_name=("a", "b"))) == ("a", "b")
    drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=5, disable_by_batch_size=8)
    info = WorkerInfo(100, 16, 512, 300, num_speculative_tokens=5)
    lines = described(EngineConfig(ModelConfig("m"), speculative=drafts), info)
    assert lines[-1] == "speculation: ngram, K = 5"
    assert described(EngineConfig(ModelConfig("m")), info)[-1] == "speculation: off"
