"""An engine whose parts are on several nodes, in separate processes of their own; nodes that die."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM
from tests.support.distributed import ray_nodes
from tests.support.distributed.engine import tiny_pair
from tests.support.processes import wait_until

ROOT = Path(__file__).parents[2]
LIMIT_S = 300.0
HANG_S = 5.0
"""What is gone without a word is missed after this long."""
SPREAD_OUT = {"strategy": "SPREAD", "ranks": 1, "cpus": [1, 1, 1]}
"""One CPU a node: the controller, the target and the draft have a node each."""

pytestmark = [pytest.mark.full, pytest.mark.timeout(0)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    target, draft = tiny_pair(tmp_path_factory.mktemp("models"))
    return {"model": str(target), "draft": str(draft)}


@dataclass(frozen=True)
class Said:
    """The outputs of one process without speculation."""

    outputs: list[list[int]]
    streamed: list[int]


@pytest.fixture(scope="module")
def undisturbed(models: dict[str, str]) -> Said:
    with LLM(models["model"], **ray_nodes.SMALL) as llm:
        return Said(ray_nodes.generated(llm), ray_nodes.stream(llm, lambda: None))


def on_nodes(order: dict[str, Any]) -> dict[str, Any]:
    """Run *order* in a separate process; return its results. It must leave no process running."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SLIPSTREAM_TEST": f"{os.getpid()}"}
    command = [sys.executable, "-m", "tests.support.distributed.ray_nodes", json.dumps(order)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    wait_until(lambda: not left_behind(environment["SLIPSTREAM_TEST"]), what="leaked processes")
    answer: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    return answer


def left_behind(mark: str) -> list[int]:
    """Return the processes, other than this one, whose environment carries *mark*."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and f"SLIPSTREAM_TEST={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    "order",
    [
        pytest.param({"strategy": "PACK", "ranks": 2, "cpus": [3, 1]}, id="two nodes"),
        pytest.param(SPREAD_OUT, id="a node each"),
    ],
)
def test_a_draft_on_another_node_changes_no_token(
    models: dict[str, str], undisturbed: Said, order: dict[str, Any]
) -> None:
    answer = on_nodes({"what": "tokens", **order, **models})
    targets = {node for name, node in answer["where"].items() if name.startswith("target")}
    assert len(targets) == 1
    assert answer["where"]["draft"] not in targets
    assert answer["outputs"] == undisturbed.outputs
    assert answer["proposed"] > answer["accepted"] > 0


def test_the_node_of_the_draft_may_die(models: dict[str, str], undisturbed: Said) -> None:
    answer = on_nodes({"what": "lose", "who": "draft", **SPREAD_OUT, **models})
    assert "error" not in answer, answer
    assert answer["streamed"] == undisturbed.streamed
    assert answer["outputs"] == undisturbed.outputs
    assert answer["changes"]["lost"] >= 1


def test_targets_whose_node_died_are_waited_for_and_then_it_is_an_error(models: dict[str, str]) -> None:
    answer = on_nodes({"what": "lose", "who": "target rank 0", **SPREAD_OUT, **models})
    assert answer["error"] == "NoRoomError", answer
    assert "there is no room for target rank 0" in answer["text"]
    assert answer["seconds"] < ray_nodes.REBUILD_S + 10.0  # to be noticed, and to be waited for


def test_the_node_of_the_controller_takes_the_engine_with_it(models: dict[str, str]) -> None:
    answer = on_nodes({"what": "lose", "who": "controller", **SPREAD_OUT, **models})
    assert answer["error"] == "EngineDeadError", answer
    assert answer["seconds"] < HANG_S  # Ray takes about 2 s to report that a node is gone
