"""Ray on machines made of namespaces, an engine whose parts are on them, and the silence after a fault."""

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.distributed.machines import PATH, ROOT, Machine, machines
from tests.support.processes import wait_until

BIN = Path(sys.executable).parent
PATIENCE_S = 300.0
PORT = 6379
STORE_BYTES = 80 * 2**20
WORKER = {"CPU": 1, "accel": 1}
"""What a worker takes. The head has no `accel` and one CPU: the controller is there, and each worker elsewhere."""


class RayMachines:
    """A Ray cluster: the first machine is the head.

    Args:
        folder: which all machines see.
        variables: the environment of Ray's processes.
    """

    def __init__(self, nodes: list[Machine], folder: Path, variables: dict[str, str] | None = None) -> None:
        self.head, *self.others = nodes
        self.folder, self._variables = folder, dict(variables or {})
        for node in nodes:
            node.environment |= {
                "PATH": f"{BIN}:{PATH}",
                "PYTHONPATH": str(ROOT),
                "RAY_ADDRESS": f"{self.head.address}:{PORT}",
                "RAY_AUTH_MODE": "disabled",
                "RAY_USAGE_STATS_ENABLED": "0",
                "OMP_NUM_THREADS": "1",
                **self._variables,
            }

    def start_head(self, *options: str, cpus: int = 1) -> None:
        self._start(self.head, "--head", f"--port={PORT}", f"--num-cpus={cpus}", "--include-dashboard=false", *options)

    def start(self, node: Machine, *, accel: int = 1, cpus: int = 1) -> None:
        """Let a machine join, with room for *accel* workers."""
        resources = json.dumps({"accel": accel})
        self._start(node, f"--address={self.head.address}:{PORT}", f"--num-cpus={cpus}", f"--resources={resources}")

    def start_others(self, *, cpus: int = 1) -> None:
        """Let all other machines join, with room for a worker each; not at once, since Ray gives each 30 s."""
        for node in self.others:
            self.start(node, cpus=cpus)

    def _start(self, node: Machine, *options: str) -> None:
        common = ("--num-gpus=0", f"--object-store-memory={STORE_BYTES}")
        if node.run("ray", "start", *options, *common, timeout=PATIENCE_S).returncode:
            node.run("ray", "stop", "--force", timeout=PATIENCE_S)
            node.output("ray", "start", *options, *common, timeout=PATIENCE_S)

    def at(self, address: str) -> Machine:
        return next(node for node in (self.head, *self.others) if node.address == address)


class MachineEngine:
    """The engine's process, on the head if not said otherwise, and what it writes."""

    def __init__(self, cluster: RayMachines, order: dict[str, Any], on: Machine | None = None) -> None:
        self._cluster = cluster
        self._folder = cluster.folder / "engine"
        self._folder.mkdir()
        (self._folder / "order").write_text(json.dumps(order))
        self.log = self._folder / "log"
        with self.log.open("wb") as log:
            self._process = (cluster.head if on is None else on).start(
                "python", "-m", "tests.support.distributed.machine_engine", self._folder / "order",
                stdout=log, stderr=log,
            )  # fmt: skip

    def wait_streaming(self) -> float:
        """Wait until tokens arrive; return the seconds."""
        return wait_until(lambda: self._streams() or self._has_failed(), PATIENCE_S, self.log)

    def _streams(self) -> bool:
        return len(self.arrivals()) > 50

    def _has_failed(self) -> bool:
        assert self._process.poll() is None, self.log.read_text()[-3000:]
        return False

    def machine_of(self, worker: str) -> Machine:
        return self._cluster.at(json.loads((self._folder / "placed").read_text())[worker])

    def arrivals(self) -> list[float]:
        path = self._folder / "arrivals"
        return [float(line) for line in path.read_text().splitlines()[:-1]] if path.exists() else []

    def states(self) -> list[tuple[float, bool, bool, str]]:
        return [tuple(json.loads(line)) for line in (self._folder / "states").read_text().splitlines()]

    def noticed(self, since: float) -> float:
        """Return the seconds from *since* until the loss of a worker was known."""
        return next((at - since for at, lost, down, _ in self.states() if at > since and (lost or down)), float("nan"))

    def outage(self) -> str:
        """Return what clients are told about the target group now; empty while it serves."""
        return self.states()[-1][3]

    def silence(self, since: float) -> float:
        """Return the longest time without a token from *since* until now."""
        times = [since, *(at for at in self.arrivals() if at > since), time.monotonic()]
        return max(after - before for before, after in itertools.pairwise(times))

    def wait_serving(self, since: float, steady_s: float = 3.0) -> float:
        """Wait until tokens have come for *steady_s* with the target in service; return the longest silence."""

        def is_steady() -> bool:
            now, arrivals = time.monotonic(), self.arrivals()
            recent = [at for at in arrivals if at > now - steady_s]
            has_gap = any(after - before > 1.0 for before, after in itertools.pairwise([now - steady_s, *recent, now]))
            return not has_gap and not self.states()[-1][1]

        wait_until(lambda: is_steady() or self._has_failed(), PATIENCE_S, self.log)
        return self.silence(since)

    def wait_end(self, seconds: float) -> None:
        """Wait until the process has ended by itself."""
        self._process.wait(seconds)

    def stop(self) -> list[dict[str, Any]]:
        """End the streams; return the answers."""
        (self._folder / "stop").touch()
        assert self._process.wait(PATIENCE_S) == 0, self.log.read_text()[-3000:]
        return list(json.loads((self._folder / "answers").read_text()))


@contextmanager
def ray_machines(folder: Path, *names: str, variables: dict[str, str] | None = None) -> Iterator[RayMachines]:
    with machines("head", *names, folder=folder) as nodes:
        yield RayMachines(nodes, folder, variables)


def give(cluster: RayMachines, **folders: Path) -> dict[str, str]:
    """Copy folders of this computer to the folder that all machines see; return their new paths."""
    paths = {}
    for name, path in folders.items():
        subprocess.run(["cp", "-r", str(path), str(cluster.folder / name)], check=True)
        paths[name] = str(cluster.folder / name)
    return paths
