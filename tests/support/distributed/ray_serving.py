"""Clusters started by `ray start`, and what Ray Serve runs there."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.support.processes import wait_until

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[3]
STORE_BYTES = 80 * 2**20
PATIENCE_S = 600.0
"""Timeout of every wait, in seconds; the machine may be busy."""
LOOPBACK = "127.0.0.1"
OPTIONS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


def free_ports(count: int) -> list[int]:
    """Return free ports below the system's ephemeral range."""
    found: list[int] = []
    for port in range(20_000 + os.getpid() % 9_000, 32_000):
        with socket.socket() as probe:
            if probe.connect_ex((LOOPBACK, port)) != 0:
                found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("no free ports")


class Cluster:
    """Nodes started here by `ray start --block`; other Ray processes are left alone.

    Args:
        folder: for Ray's files; its path must be short.
        variables: environment variables of every process.
    """

    def __init__(self, folder: Path, **variables: str) -> None:
        self.port, self.dashboard, self.http, self.grpc = free_ports(4)
        self._ports = iter(free_ports(40)[4:])
        self._folder = folder
        self.environment = {**os.environ, **OPTIONS, "PYTHONPATH": str(ROOT), **variables}
        for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
            self.environment.pop(name, None)
        self._nodes: list[subprocess.Popen[bytes]] = []

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.port}"

    @property
    def dashboard_url(self) -> str:
        return f"http://{LOOPBACK}:{self.dashboard}"

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.http}"

    @property
    def target(self) -> str:
        return f"{LOOPBACK}:{self.grpc}"

    @property
    def node_pids(self) -> list[int]:
        return [node.pid for node in self._nodes]

    def start(self, command: str, num_cpus: int) -> None:
        """Run a `ray start` line as another node on this machine, on ports of its own."""
        log = self._folder / f"node{len(self._nodes)}.log"
        own = [
            "--block",
            f"--num-cpus={num_cpus}",
            "--num-gpus=0",
            f"--object-store-memory={STORE_BYTES}",
            f"--node-ip-address={LOOPBACK}",
            "--min-worker-port=0",
            "--max-worker-port=0",
            f"--dashboard-agent-listen-port={next(self._ports)}",
            f"--metrics-export-port={next(self._ports)}",
        ]
        if "--head" in command:
            own += [f"--temp-dir={self._folder}", f"--ray-client-server-port={next(self._ports)}"]
        environment = {**self.environment, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
        with log.open("wb") as out:
            node = subprocess.Popen(
                ["bash", "-c", f"exec env {command} {' '.join(own)}"],
                env=environment,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self._nodes.append(node)
        wait_until(lambda: b"Ray runtime started" in log.read_bytes() or node.poll() is not None, PATIENCE_S, command)
        assert node.poll() is None, log.read_text()[-3000:]

    def serve(self, *words: str, timeout_s: float = PATIENCE_S, **variables: str) -> "subprocess.CompletedProcess[str]":
        """Run Ray Serve's own command line."""
        return subprocess.run(
            [BIN / "serve", *words],
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def deploy(self, config: dict[str, Any]) -> None:
        """Run `serve deploy` with *config*, and wait until all applications run."""
        path = self._folder / "config.yaml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        ran = self.serve("deploy", str(path), "-a", self.dashboard_url)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        self.wait_running()

    def told(self) -> dict[str, Any]:
        """Return Serve's status, empty if there is none."""
        token = self.environment.get("RAY_AUTH_TOKEN")
        headers = {"authorization": f"Bearer {token}"} if token else {}
        try:
            answer = httpx.get(f"{self.dashboard_url}/api/serve/applications/", headers=headers, timeout=60)
        except httpx.TransportError:
            return {}
        return dict(answer.json()) if answer.status_code == 200 else {}

    def replicas(self) -> dict[str, int]:
        """Return the process ids of running replicas by replica id."""
        found = [
            replica
            for application in self.told().get("applications", {}).values()
            for deployment in application["deployments"].values()
            for replica in deployment["replicas"]
        ]
        return {each["replica_id"]: each["pid"] for each in found if each["state"] == "RUNNING"}

    def wait_running(self) -> None:
        """Wait until every application runs; fail if one cannot."""

        def runs() -> bool:
            applications = list(self.told().get("applications", {}).values())
            failed = [each["message"] for each in applications if "FAILED" in each["status"]]
            assert not failed, failed[0][-3000:]
            return bool(applications) and all(each["status"] == "RUNNING" for each in applications)

        wait_until(runs, PATIENCE_S, "applications that run")

    def close(self) -> None:
        """Stop the nodes, the last first, and their child processes."""
        for node in reversed(self._nodes):
            started = members(node.pid)
            node.send_signal(signal.SIGTERM)
            _end(node)
            for pid in started:
                _kill(pid)


def _end(node: "subprocess.Popen[bytes]") -> None:
    try:
        node.wait(45)
    except subprocess.TimeoutExpired:
        node.kill()
        node.wait()


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def members(ancestor: int) -> list[int]:
    """Return the ids of all descendant processes of *ancestor*."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit():
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = [ancestor]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


@contextmanager
def cluster(folder: Path, **variables: str) -> Iterator[Cluster]:
    made = Cluster(folder, **variables)
    try:
        yield made
    finally:
        made.close()


def head_line(made: Cluster) -> str:
    """Return the command that starts a head node."""
    return (
        f"ray start --head --port={made.port} --dashboard-host={LOOPBACK} --dashboard-port={made.dashboard} "
        "--include-dashboard=true"
    )


def on_ports_of(made: Cluster, config: dict[str, Any]) -> dict[str, Any]:
    """Return *config* with the ports of *made* and without compilation, which would take minutes."""
    (application,) = config["applications"]
    return {
        **config,
        "http_options": {**config["http_options"], "host": LOOPBACK, "port": made.http},
        "grpc_options": {**config["grpc_options"], "port": made.grpc},
        "applications": [{**application, "args": {**application["args"], "enforce_eager": True}}],
    }


@dataclass
class Stream:
    """The result of one streamed answer."""

    text: str = ""
    finish_reason: str | None = None
    error: str | None = None

    @property
    def is_whole(self) -> bool:
        return self.finish_reason is not None and self.error is None


def until(condition: Callable[[], bool], what: object) -> float:
    return wait_until(condition, PATIENCE_S, what)
