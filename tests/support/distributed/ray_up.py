"""`ray up` of `cluster/cluster-venv.yaml` from one machine onto others."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.support.distributed.deployments import CLUSTER, load
from tests.support.distributed.machines import HOME, ROOT, Machine, machines
from tests.support.processes import wait_until

BIN = Path(sys.executable).parent
SITE = next(Path(each) for each in sys.path if each.endswith("site-packages"))
PATIENCE_S = 600.0
CONFIG_SERVED = "~/slipstream/cluster/deploy/serve/config.yaml"
"""The Serve configuration, where `cluster-venv.yaml` puts it."""
PREPARED = f"""
set -e
{sys.executable} -m venv --without-pip ~/slipstream/.venv
echo {SITE} > ~/slipstream/.venv/lib/python3.{sys.version_info.minor}/site-packages/shared.pth
for tool in pip ray serve; do
    {{ echo '#!{HOME}/slipstream/.venv/bin/python'; tail -n +2 {BIN}/$tool; }} > ~/slipstream/.venv/bin/$tool
    chmod +x ~/slipstream/.venv/bin/$tool
done
mkdir -p ~/.config/pip
printf '[install]\\nno-index = true\\nno-build-isolation = false\\n' > ~/.config/pip/pip.conf
"""
"""Makes the virtual environment of a machine that reaches no package index: it finds the packages of this one. In pip's
file `no-build-isolation = false` means what `--no-build-isolation` does."""


class Launched:
    """A cluster described by `cluster-venv.yaml`, and the machine from which it is launched.

    Attributes:
        operator: runs `ray up`; no node of the cluster.
        nodes: the head, then the workers.
    """

    def __init__(self, operator: Machine, nodes: list[Machine], folder: Path) -> None:
        self.operator, self.nodes, self._folder = operator, nodes, folder
        self.operator.environment |= {"PATH": f"{BIN}:/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": str(ROOT)}
        for node in nodes:
            node.output("mkdir", "-p", "slipstream")
            node.output("bash", "-c", PREPARED)
        self.operator.output("ray", "get-auth-token", "--generate")
        self.path = folder / "cluster.yaml"
        self.path.write_text(yaml.safe_dump(self.config()))

    def config(self) -> dict[str, Any]:
        """Return the shipped configuration with what a user fills in: addresses and the key."""
        head, *workers = [node.address for node in self.nodes]
        shipped = load(CLUSTER / "cluster-venv.yaml")
        shipped["provider"] |= {"head_ip": head, "worker_ips": workers}
        shipped["auth"]["ssh_private_key"] = str(self._folder / "key")
        return {**shipped, "min_workers": len(workers), "max_workers": len(workers)}

    def ray(self, *words: object) -> str:
        """Run `ray` in the checkout on the operator's machine; return what it printed."""
        return self.operator.output("env", "-C", ROOT, BIN / "ray", *words, timeout=PATIENCE_S)

    def up(self, *options: str) -> str:
        return self.ray("up", "-y", *options, self.path)

    def down(self) -> str:
        return self.ray("down", "-y", self.path)

    def on_head(self, command: str) -> str:
        """Run a shell command by `ray exec`."""
        return self.ray("exec", self.path, command)
