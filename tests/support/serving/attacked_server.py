"""A `slipstream serve` process with the fake engine, to be attacked, and what is measured of it meanwhile."""

import contextlib
import http.client
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.support.processes import wait_until
from tests.support.serving.fake_engine import expected

ROOT = Path(__file__).parents[3]
CODE = """
import resource, sys
sys.path[:0] = [{path!r}]
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
from cluster import channels
from cluster.serving import service, setup
from cluster.serving.grpc_server import GrpcOptions
from cluster.serving.http_server import HttpOptions
from protos.config.engine import EngineConfig, ModelConfig
from runtime.subprocess import python_command
from tests.support.serving import fake_engine

setup.load_tokenizer = lambda config: fake_engine.tokenizer()
channels.python_command = lambda module: python_command("tests.support.serving.fake_engine")
config = EngineConfig(ModelConfig("fake", max_model_len=4096))
service.serve(config, service.ServiceOptions("1", HttpOptions("127.0.0.1", 0), GrpcOptions("127.0.0.1", 0), grace_s=5))
"""


@dataclass(frozen=True)
class Attacked:
    """A running server."""

    process: "subprocess.Popen[bytes]"
    log: Path

    @property
    def ports(self) -> tuple[int, int]:
        """The ports of HTTP and gRPC."""
        found = re.search(r"ready on http://[\d.]+:(\d+), gRPC on [\d.]+:(\d+)", self.log.read_text())
        assert found is not None, self.log.read_text()
        return int(found[1]), int(found[2])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    @property
    def log_bytes(self) -> int:
        return self.log.stat().st_size

    def memory_mib(self) -> float:
        """Return the resident memory of the server and its children."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        statuses = [Path(f"/proc/{pid}/status").read_text() for pid in (str(self.process.pid), *children)]
        return sum(int(found[1]) for text in statuses if (found := re.search(r"VmRSS:\s+(\d+)", text))) / 1024

    def check_answers(self) -> None:
        """Check that a request is answered as if nothing had been."""
        body = {"prompt": "calm", "max_tokens": 5, "temperature": 0}
        answer = httpx.post(self.url + "/v1/completions", json=body, timeout=60)
        assert answer.json()["choices"][0]["text"] == expected("calm", 5), answer.text

    def post(self, path: str, content: bytes) -> int:
        """Send a body on a connection of its own; return the status."""
        headers = {"content-type": "application/json"}
        return httpx.post(self.url + path, content=content, headers=headers, timeout=300).status_code

    def crowd(self, port: int, number: int) -> list[socket.socket]:
        """Open *number* connections that send nothing."""
        opened = []
        for _ in range(number):
            with contextlib.suppress(OSError):  # the backlog may be full
                opened.append(socket.create_connection(("127.0.0.1", port), 5))
        return opened


@contextlib.contextmanager
def attacked(log: Path, soft: int = 256, hard: int = 512) -> Iterator[Attacked]:
    """Serve with these limits on open files; what it logs goes to *log*."""
    code = CODE.format(path=str(ROOT), soft=soft, hard=hard)
    with log.open("wb") as stderr, subprocess.Popen([sys.executable, "-c", code], stderr=stderr) as process:
        server = Attacked(process, log)
        try:
            wait_until(lambda: "ready on" in log.read_text() or process.poll() is not None, 90, "a server")
            yield server
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()


class HealthProbe:
    """Asks `/health` on a new connection, again and again, from a thread."""

    def __init__(self, port: int, every_s: float = 0.02) -> None:
        self._port = port
        self._every_s = every_s
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self.worst_s = 0.0
        self.statuses: dict[object, int] = {}

    def __enter__(self) -> "HealthProbe":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join(120)

    def _ask(self) -> None:
        while not self._ends.wait(self._every_s):
            began = time.monotonic()
            status = self._status()
            self.worst_s = max(self.worst_s, time.monotonic() - began)
            self.statuses[status] = self.statuses.get(status, 0) + 1

    def _status(self) -> object:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status
        except OSError as error:
            return type(error).__name__
        finally:
            connection.close()
