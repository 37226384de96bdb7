"""`ray up cluster/cluster-venv.yaml` on machines made of namespaces, as a user runs it."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.distributed.machines import ROOT, Machine, machines, missing
from tests.support.distributed.ray_up import ASKED, SHIPPED, launched
from tests.support.processes import wait_until

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.timeout(0)]
needs_ssh = pytest.mark.skipif(bool(missing(ssh=True)), reason=missing(ssh=True))
PORT = 8123


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="machines-", dir="/tmp") as made:  # paths of sockets must be short
        yield Path(made)


@pytest.fixture(scope="module")
def answer() -> str:
    """The demo pair's answer in one process."""
    from slipstream import LLM, SamplingParams

    params = SamplingParams(temperature=ASKED["temperature"], max_tokens=ASKED["max_tokens"])
    with LLM(enforce_eager=True, num_gpu_blocks_override=64, speculative_config=None) as llm:
        return llm.generate(ASKED["prompt"], params, use_tqdm=False)[0].outputs[0].text


def interfaces() -> list[str]:
    return sorted(path.name for path in Path("/sys/class/net").iterdir())


def is_reached(machine: Machine, other: Machine) -> bool:
    url = f"http://{other.address}:{PORT}"
    request = f"import urllib.request; urllib.request.urlopen({url!r}, timeout=2)"
    return machine.run(sys.executable, "-c", request).returncode == 0


def test_machines_see_each_other_and_nothing_of_this_computer(folder: Path) -> None:
    before = interfaces()
    with machines("one", "two", folder=folder) as (one, two):
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
@needs_ssh
def test_two_machines_serve_after_ray_up_and_nothing_runs_after_ray_down(folder: Path, answer: str) -> None:
    with launched(folder, "worker") as made:
        timed("ray up", made.up)
        say("all nodes", made.wait_joined())
        timed("serve deploy", lambda: made.on_head(f"serve deploy {made.eager()}"))
        say("first answer", made.wait_serving())
        assert made.answers(made.nodes[0]) == {"http": answer, "grpc": answer}
        timed("ray down", made.down)
        say("nothing left", made.wait_empty())


@pytest.mark.full
@needs_ssh
def test_three_machines_as_shipped_and_ray_up_again(folder: Path, answer: str) -> None:
    with launched(folder, "worker1", "worker2") as made:
        head = made.nodes[0]
        timed("ray up", made.up)
        say("all nodes", made.wait_joined())
        timed("serve deploy", lambda: made.on_head(f"serve deploy {SHIPPED}"))
        say("first answer, after compiling", made.wait_serving())
        proxied = [node for node in made.nodes if made.has_proxy(node)]
        assert head in proxied
        assert [made.answers(node) for node in proxied] == [{"http": answer, "grpc": answer}] * len(proxied)
        replicas = [made.num_replicas(node) for node in made.nodes]
        print(f"replicas: {replicas}")
        assert sum(replicas) == 2

        before = [made.ray_pids(node) for node in made.nodes]
        timed("ray up --no-restart", lambda: made.up("--no-restart"))
        assert made.answers(head) == {"http": answer, "grpc": answer}
        assert [made.ray_pids(node) for node in made.nodes] == before

        timed("ray up again", made.up)
        say("all nodes again", made.wait_joined())
        timed("serve deploy again", lambda: made.on_head(f"serve deploy {SHIPPED}"))
        say("first answer again", made.wait_serving())
        assert made.answers(head) == {"http": answer, "grpc": answer}

        timed("ray down", made.down)
        say("nothing left", made.wait_empty())


def timed(what: str, act: Callable[[], str]) -> str:
    started = time.monotonic()
    said = act()
    say(what, time.monotonic() - started)
    return said


def say(what: str, seconds: float) -> None:
    print(f"{what}: {seconds:.0f} s")
