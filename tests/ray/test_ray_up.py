"""`ray up cluster/cluster-venv.yaml` on machines made of namespaces, as a user runs it."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.distributed.machines import missing
from tests.support.distributed.ray_up import ASKED, launched

LACKING = missing(ssh=True)
pytestmark = [pytest.mark.timeout(0), pytest.mark.skipif(bool(LACKING), reason=LACKING)]


@pytest.fixture(scope="module")
def answer() -> str:
    """The demo pair's answer in one process."""
    from slipstream import LLM, SamplingParams

    params = SamplingParams(temperature=ASKED["temperature"], max_tokens=ASKED["max_tokens"])
    with LLM(enforce_eager=True, num_gpu_blocks_override=64, speculative_config=None) as llm:
        return llm.generate(ASKED["prompt"], params, use_tqdm=False)[0].outputs[0].text


def test_two_machines_answer_after_ray_up(short_dir: Path, answer: str) -> None:
    with launched(short_dir, "worker") as made:
        made.up()
        made.wait_joined()
        made.deploy()
        made.wait_serving()
        assert made.answers(made.nodes[0]) == {"http": answer, "grpc": answer}
        made.down()


@pytest.mark.full
def test_two_machines_serve_after_ray_up_and_nothing_runs_after_ray_down(short_dir: Path, answer: str) -> None:
    with launched(short_dir, "worker") as made:
        timed("ray up", made.up)
        say("all nodes", made.wait_joined())
        timed("serve deploy", made.deploy)
        say("first answer", made.wait_serving())
        assert made.answers(made.nodes[0]) == {"http": answer, "grpc": answer}
        timed("ray down", made.down)
        say("nothing left", made.wait_empty())


@pytest.mark.full
def test_three_machines_and_ray_up_again(short_dir: Path, answer: str) -> None:
    with launched(short_dir, "worker1", "worker2") as made:
        head = made.nodes[0]
        timed("ray up", made.up)
        say("all nodes", made.wait_joined())
        timed("serve deploy", made.deploy)
        say("first answer", made.wait_serving())
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
        timed("serve deploy again", made.deploy)
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
