"""`ray up` of `cluster/cluster-venv.yaml` from one machine onto others, and requests from that machine.

    python -m tests.support.distributed.ray_up 10.77.0.12

asks the Serve application on that machine over HTTP and over gRPC, and prints both answers.
"""

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.support.distributed.deployments import CLUSTER, load
from tests.support.distributed.machines import HOME, PATH, ROOT, Machine, machines
from tests.support.processes import wait_until

BIN = Path(sys.executable).parent
SITE = next(Path(each) for each in sys.path if each.endswith("site-packages"))
PATIENCE_S = 600.0
"""Timeout of every wait, in seconds; the computer may be busy."""
NODE_PYTHON = HOME / "slipstream/.venv/bin/python"
SHIPPED = "~/slipstream/cluster/deploy/serve/config.yaml"
"""The Serve configuration, where `cluster-venv.yaml` puts it."""
ASKED: dict[str, Any] = {"prompt": "def fibonacci(n):", "max_tokens": 8, "temperature": 0}
PREPARED = f"""
set -e
{sys.executable} -m venv --without-pip ~/slipstream/.venv
echo {SITE} > ~/slipstream/.venv/lib/python3.{sys.version_info.minor}/site-packages/shared.pth
for tool in pip ray serve; do
    {{ echo '#!{NODE_PYTHON}'; tail -n +2 {BIN}/$tool; }} > ~/slipstream/.venv/bin/$tool
    chmod +x ~/slipstream/.venv/bin/$tool
done
mkdir -p ~/.config/pip
printf '[install]\\nno-index = true\\nno-build-isolation = false\\n' > ~/.config/pip/pip.conf
"""
"""Makes a virtual environment that finds this one's packages, for machines that reach no package index. In pip's file
`no-build-isolation = false` means what `--no-build-isolation` does."""


class Launched:
    """A cluster described by `cluster-venv.yaml`.

    Attributes:
        operator: the machine on which `ray up` runs; it is no node.
        nodes: the head, then the workers.
    """

    def __init__(self, operator: Machine, nodes: list[Machine], folder: Path) -> None:
        self.operator, self.nodes, self._folder = operator, nodes, folder
        operator.environment |= {"PATH": f"{BIN}:{PATH}", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        operator.output("ray", "get-auth-token", "--generate")
        for node in nodes:
            node.output("bash", "-c", PREPARED)
        self._file = folder / "cluster-venv.yaml"
        self._file.write_text(yaml.safe_dump(self._filled_in(), sort_keys=False))

    def _filled_in(self) -> dict[str, Any]:
        """Return the shipped configuration with what users fill in: addresses and their key."""
        head, *workers = [node.address for node in self.nodes]
        shipped = load(CLUSTER / "cluster-venv.yaml")
        shipped["provider"] |= {"head_ip": head, "worker_ips": workers}
        shipped["auth"]["ssh_private_key"] = str(self._folder / "key")
        return {**shipped, "min_workers": len(workers), "max_workers": len(workers)}

    def up(self, *options: str) -> str:
        return self._ray("up", "-y", *options, self._file)

    def down(self) -> str:
        return self._ray("down", "-y", self._file)

    def on_head(self, command: str) -> str:
        """Run a command that needs the token, as the head of the shipped file shows."""
        return self._ray("exec", self._file, f"RAY_AUTH_MODE=token {command}")

    def _ray(self, *words: object) -> str:
        return self.operator.output("env", "-C", ROOT, "ray", *words, timeout=PATIENCE_S)

    def wait_joined(self) -> float:
        """Wait until every machine is a node of the cluster; return the seconds."""
        return wait_until(lambda: self.num_joined() == len(self.nodes), PATIENCE_S, "all nodes")

    def num_joined(self) -> int:
        status = self.nodes[0].run("env", "RAY_AUTH_MODE=token", HOME / "slipstream/.venv/bin/ray", "status").stdout
        found = re.search(r"Active:\n (\d+) local\.cluster\.node", status)
        return int(found[1]) if found else 0

    def wait_serving(self) -> float:
        """Wait until the head passes requests on; return the seconds."""
        url = f"http://{self.nodes[0].address}:8000/health"
        request = f"import httpx; httpx.get({url!r}, timeout=10).raise_for_status()"
        return wait_until(lambda: self.operator.run("python", "-c", request).returncode == 0, PATIENCE_S, url)

    def wait_empty(self) -> float:
        """Wait until no process is left on any node; return the seconds."""
        return wait_until(lambda: not any(node.processes() for node in self.nodes), PATIENCE_S, "empty machines")

    def has_proxy(self, node: Machine) -> bool:
        return any(args == "ray::ProxyActor" for args in node.processes().values())

    def num_replicas(self, node: Machine) -> int:
        return sum(args.startswith("ray::ServeReplica") for args in node.processes().values())

    def ray_pids(self, node: Machine) -> list[int]:
        """Return the processes of Ray itself, of Serve and of its replicas, but for workers that wait for tasks."""
        kept = ("raylet ", "gcs_server ", "ray::ServeReplica", "ray::ServeController", "ray::ProxyActor")
        return [pid for pid, args in node.processes().items() if any(part in args for part in kept)]

    def answers(self, node: Machine) -> dict[str, str]:
        """Return the answers over `http` and `grpc` to `ASKED`, asked on the operator's machine."""
        return dict(json.loads(self.operator.output("python", "-m", __name__, node.address).splitlines()[-1]))

    def deploy(self) -> str:
        """Deploy the shipped Serve configuration, but for compiling, which takes minutes of each machine."""
        self.nodes[0].output(
            "bash", "-c", f"sed 's/device: cpu/&\\n      enforce_eager: true/' {SHIPPED} > ~/eager.yaml"
        )
        return self.on_head("serve deploy ~/eager.yaml")


@contextmanager
def launched(folder: Path, *workers: str) -> Iterator[Launched]:
    """Yield machines for a cluster with these *workers*, prepared as the head of `cluster-venv.yaml` asks."""
    with machines("operator", "head", *workers, folder=folder, ssh=True) as (operator, *nodes):
        yield Launched(operator, nodes, folder)


def ask(address: str) -> dict[str, str]:
    """Return the answers of a node over both protocols."""
    import grpc
    import httpx

    from protos import slipstream_v1_pb2 as pb
    from protos import slipstream_v1_pb2_grpc as stubs

    answer = httpx.post(f"http://{address}:8000/v1/completions", json=ASKED, timeout=PATIENCE_S)
    answer.raise_for_status()
    sampling = pb.SamplingParams(temperature=ASKED["temperature"], max_tokens=ASKED["max_tokens"])
    with grpc.insecure_channel(f"{address}:9000") as channel:
        request = pb.GenerateRequest(text=ASKED["prompt"], sampling=sampling)
        *_, last = stubs.GenerationServiceStub(channel).Generate(request, timeout=PATIENCE_S)
    return {"http": answer.json()["choices"][0]["text"], "grpc": last.complete.text}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(ask(sys.argv[1])) + "\n")
