"""`slipstream serve` with both servers, as a process: health while it loads, a drain that still answers, options."""

import asyncio
import contextlib
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.cli import main as cli
from cluster.cli import serve as cli_serve
from cluster.serving.frontend import bound
from cluster.serving.grpc_server import GrpcFrontend, GrpcOptions
from protos import slipstream_v1_pb2_grpc as stubs
from protos.errors import ConfigError
from runtime.http.server.limits import ConnectionLimits, GuardOptions
from tests.support.serving.certificates import Authority
from tests.support.serving.grpc_server import HOST, SERVICE, answer, request
from tests.support.serving.server_process import Running

ROOT = Path(__file__).parents[2]
LONG = 200_000
PATIENCE_S = 240
SERVE = """
import sys
sys.path[:0] = {path!r}
from tests.support.serving import fake_engine
from cluster import channels
from cluster.serving import service, setup
from cluster.serving.grpc_server import GrpcOptions
from cluster.serving.http_server import HttpOptions
from protos.config.engine import EngineConfig, ModelConfig
from runtime.subprocess import python_command
setup.load_tokenizer = lambda config: fake_engine.tokenizer()
channels.python_command = lambda module: python_command("tests.support.serving.fake_engine")
config = EngineConfig(ModelConfig({model!r}, max_model_len={length}))
servers = HttpOptions("127.0.0.1", 0), GrpcOptions("127.0.0.1", {port})
service.serve(config, service.ServiceOptions("1", *servers, grace_s=200))
"""
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@contextlib.contextmanager
def running(model: str = "fake", port: int = 0) -> Iterator[Running]:
    code = SERVE.format(path=[str(ROOT)], model=model, length=LONG, port=port)
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as process:
        try:
            yield Running(process)
        finally:
            process.kill()


def free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        return int(listener.getsockname()[1])


def health(channel: grpc.Channel, service: str) -> int:
    asked = health_pb2.HealthCheckRequest(service=service)
    return int(health_pb2_grpc.HealthStub(channel).Check(asked, wait_for_ready=True, timeout=PATIENCE_S).status)


def test_a_drain_lets_answers_end_and_takes_nothing_new() -> None:
    with running() as server:
        found = re.search(r"ready on (http://\S+), gRPC on \S+?:(\d+);", server.until("ready on"))
        assert found is not None
        url, port = found.groups()
        narrow = (("grpc.http2.bdp_probe", 0),)
        with grpc.insecure_channel(f"{HOST}:{port}", narrow) as channel, httpx.Client(timeout=PATIENCE_S) as client:
            stub = stubs.GenerationServiceStub(channel)
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
            assert next(watch).status == SERVING
            assert client.get(url + "/health").status_code == 200
            # More than fits on the way to a client that does not read: it is in flight until it is read.
            in_flight = stub.Generate(request("on and on", 6000, logprobs=5))
            next(in_flight)
            body = {"prompt": "on and on", "max_tokens": 6000, "stream": True}
            with client.stream("POST", url + "/v1/completions", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                server.process.send_signal(signal.SIGTERM)
                assert next(watch).status == NOT_SERVING
                with pytest.raises(grpc.RpcError) as refused:
                    list(stub.Generate(request("too late")))
                assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
                assert "about to stop" in refused.value.details()
                late = httpx.post(url + "/v1/completions", json={"prompt": "x"}, timeout=PATIENCE_S)
                assert (late.status_code, httpx.get(url + "/health", timeout=PATIENCE_S).status_code) == (503, 503)
                assert answer(in_flight)[1][0].usage.completion_tokens == 6000
                assert list(lines)[-2:] == ["data: [DONE]", ""]
        code, log = server.ended()
        assert code == 0, log
        assert "Traceback" not in log
        assert "Error" not in log


def test_health_is_told_while_the_model_loads() -> None:
    port = free_port()
    with running("hang", port) as server:
        server.until("hanging")
        with grpc.insecure_channel(f"{HOST}:{port}") as channel:
            assert (health(channel, ""), health(channel, SERVICE)) == (SERVING, NOT_SERVING)
            with pytest.raises(grpc.RpcError) as refused:
                list(stubs.GenerationServiceStub(channel).Generate(request("x")))
            assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        server.process.send_signal(signal.SIGTERM)
        code, log = server.ended()
        assert code == 0
        assert "Traceback" not in log


# Options


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options that `serve` was called with."""
    calls: list[Any] = []
    monkeypatch.setattr(cli_serve, "serve", lambda config, options: calls.append(options))
    return calls


def serve(line: str) -> None:
    cli.app(["serve", "m", *shlex.split(line)], standalone_mode=False)


def test_where_grpc_listens(told: list[Any], tmp_path: Path) -> None:
    serve("")
    serve("--grpc-port 9100 --host ::1")
    serve("--grpc_port -1")
    config = tmp_path / "serve.yaml"
    config.write_text("grpc-port: -1\n")
    serve(f"--config {config}")
    assert [options.grpc and (options.grpc.host, options.grpc.port) for options in told] == [
        ("0.0.0.0", 9000),
        ("::1", 9100),
        None,
        None,
    ]
    assert told[0].grace_s == 30
    with pytest.raises(ConfigError, match="port and grpc_port are both 8100"):
        serve("--port 8100 --grpc-port 8100")


def test_certificates(told: list[Any], tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ours", "ours")
    own = authority.sign("server")
    serve(f"--grpc-tls-cert {own.cert} --grpc-tls-key {own.key} --grpc-tls-client-ca {authority.cert}")
    serve(f"--ssl-certfile {own.cert} --ssl-keyfile {own.key}")
    grpc_only, http_only = told
    assert (grpc_only.http.tls, http_only.grpc.tls) == (None, None)
    assert grpc_only.grpc.tls.read() == (own.cert.read_bytes(), own.key.read_bytes(), authority.cert.read_bytes())
    assert (http_only.http.tls.cert, http_only.http.tls.client_ca) == (str(own.cert), None)
    with pytest.raises(ConfigError, match="both ssl_certfile and ssl_keyfile"):
        serve(f"--ssl-certfile {own.cert}")
    edwards = authority.sign("edwards", ed25519.Ed25519PrivateKey.generate())
    serve(f"--ssl-certfile {edwards.cert} --ssl-keyfile {edwards.key}")
    with pytest.raises(ConfigError, match="gRPC clients take no Ed25519 or Ed448 key"):
        serve(f"--grpc-tls-cert {edwards.cert} --grpc-tls-key {edwards.key}")


async def taken(port: int) -> None:
    await GrpcFrontend(GrpcOptions(HOST, port), GuardOptions(), ConnectionLimits()).start()


def test_a_taken_port_is_told_with_the_way_out() -> None:
    with bound(HOST, 0) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on {HOST}:{port} .*grpc_port, or -1 for no gRPC"):
            asyncio.run(taken(port))
