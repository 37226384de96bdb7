"""Machines made of namespaces, and an engine whose parts are on several of them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.distributed.engine import tiny_pair
from tests.support.distributed.machines import PATH, ROOT, Machine, machines, missing
from tests.support.processes import wait_until

LACKING = missing()
pytestmark = pytest.mark.skipif(bool(LACKING), reason=LACKING)
BIN = Path(sys.executable).parent
PORT = 8123
LOADS = """
from slipstream import LLM, SamplingParams
from tests.support.distributed.ray_nodes import SMALL
from protos.errors import SlipstreamError
try:
    with LLM("target", distributed_executor_backend="ray", speculative_config=None, **SMALL) as llm:
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        print(len(llm.generate({"prompt_token_ids": [3, 5]}, params, use_tqdm=False)[0].outputs[0].token_ids))
except SlipstreamError as error:
    print(f"{type(error).__name__}: {error}")
"""


def interfaces() -> list[str]:
    return sorted(path.name for path in Path("/sys/class/net").iterdir())


def is_reached(machine: Machine, other: Machine) -> bool:
    url = f"http://{other.address}:{PORT}"
    request = f"import urllib.request; urllib.request.urlopen({url!r}, timeout=2)"
    return machine.run(sys.executable, "-c", request).returncode == 0


def test_machines_see_each_other_and_nothing_of_this_computer(short_dir: Path) -> None:
    before = interfaces()
    with machines("one", "two", folder=short_dir) as (one, two):
        assert one.output("hostname").strip() == "one"
        assert one.processes() == {}
        for path in ("/tmp/private", "/dev/shm/private"):
            one.output("touch", path)
            assert two.run("test", "-e", path).returncode == 1
            assert not Path(path).exists()
        assert "Read-only" in one.run("touch", ROOT / "written").stdout
        server = two.start(sys.executable, "-m", "http.server", PORT, stdout=subprocess.DEVNULL)
        wait_until(lambda: is_reached(one, two), 30)
        assert any("http.server" in line for line in two.processes().values())
        assert one.processes() == {}
        two.cut()
        assert not is_reached(one, two)
        two.join()
        wait_until(lambda: is_reached(one, two), 30)
        two.switch_off()
        assert server.wait(10) != 0
        assert interfaces() == before


@pytest.mark.full
@pytest.mark.timeout(0)
def test_a_model_folder_that_only_one_machine_has(short_dir: Path, tmp_path: Path) -> None:
    """The folder is named by a relative path on one machine; controller and worker are on the other."""
    target, _ = tiny_pair(tmp_path)
    with machines("one", "two", folder=short_dir) as (one, two):
        for machine in (one, two):
            machine.environment |= {
                "PATH": f"{BIN}:{PATH}",
                "PYTHONPATH": str(ROOT),
                "RAY_ADDRESS": f"{one.address}:6379",
            }
        one.output("ray", "start", "--head", "--port=6379", "--num-cpus=0", "--include-dashboard=false")
        two.output("ray", "start", f"--address={one.address}:6379", "--num-cpus=4")
        one.environment["RAY_ADDRESS"] = f"{one.address}:6379"
        give(target, one)
        assert loaded(one) == "ModelError: no such folder: /tmp/target, on the machine two"
        give(target, two)
        assert loaded(one) == "4"


def give(folder: Path, machine: Machine) -> None:
    """Copy a folder of this computer to `/tmp/target` of a machine."""
    packed = subprocess.run(["tar", "-C", str(folder), "-c", "."], capture_output=True, check=True).stdout
    machine.output("mkdir", "/tmp/target")
    subprocess.run(machine.command("tar", "-C", "/tmp/target", "-x"), input=packed, check=True)


def loaded(machine: Machine) -> str:
    """Load `target` in `/tmp` of a machine; return the last line that it printed."""
    return machine.output("env", "-C", "/tmp", "python", "-c", LOADS, timeout=300).splitlines()[-1]
