"""A cluster of `ray up` under load: `ray up` again, and a changed Serve configuration."""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.distributed.machines import missing
from tests.support.distributed.ray_up import PATIENCE_S, Launched, launched
from tests.support.processes import wait_until
from tests.support.serving.steady_load import Answered, read

LACKING = missing(ssh=True)
pytestmark = [pytest.mark.full, pytest.mark.timeout(0), pytest.mark.skipif(bool(LACKING), reason=LACKING)]
CHANGED = "sed -i 's/max_num_seqs: 32/max_num_seqs: 16/' ~/eager.yaml"
"""An argument of the engine: every replica must be replaced."""


def test_ray_up_again_stops_nothing_and_a_changed_configuration_fails_no_request(short_dir: Path) -> None:
    with launched(short_dir, "worker") as made:
        made.up()
        made.wait_joined()
        made.deploy()
        made.wait_serving()
        wait_until(lambda: len(replicas(made)) == 2, PATIENCE_S, "two replicas")
        with loaded(made, short_dir / "stop") as results:
            processes = [made.ray_pids(node) for node in made.nodes]
            say("ray up again", seconds(made.up))
            assert [made.ray_pids(node) for node in made.nodes] == processes

            before = replicas(made)
            made.nodes[0].output("bash", "-c", CHANGED)
            started = time.monotonic()
            made.on_head("serve deploy ~/eager.yaml")
            wait_until(lambda: is_replaced(made, before), PATIENCE_S, "two other replicas")
            say("rolled out", time.monotonic() - started)
            time.sleep(5)  # requests that went to the new replicas only
        for kind, answered in results.items():
            print(f"{kind}: {answered.count} answered, longest {answered.longest_s:.1f} s, failed: {answered.failures}")
            assert answered.count > 2
            assert answered.failures == []
            assert len(answered.texts) == 1
        made.down()
        made.wait_empty()


@contextmanager
def loaded(made: Launched, stop: Path) -> Iterator[dict[str, Answered]]:
    """Ask the head from the operator's machine meanwhile; the results are there afterwards."""
    module = "tests.support.serving.steady_load"
    words = ("env", "-C", "/", "python", "-m", module, made.nodes[0].address, stop)
    results: dict[str, Answered] = {}
    with made.operator.start(*words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as asking:
        try:
            yield results
        finally:
            stop.touch()
            printed, _ = asking.communicate(timeout=PATIENCE_S)
    assert asking.returncode == 0, printed
    results |= read(printed)


def replicas(made: Launched) -> set[tuple[str, int]]:
    """Return the replicas' machines and process ids."""
    return {
        (node.name, pid)
        for node in made.nodes
        for pid, args in node.processes().items()
        if args.startswith("ray::ServeReplica")
    }


def is_replaced(made: Launched, before: set[tuple[str, int]]) -> bool:
    now = replicas(made)
    return len(now) == len(before) and not now & before


def seconds(act: Callable[[], object]) -> float:
    started = time.monotonic()
    act()
    return time.monotonic() - started


def say(what: str, took_s: float) -> None:
    print(f"{what}: {took_s:.0f} s")
