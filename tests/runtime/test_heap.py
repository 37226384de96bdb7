"""The garbage collector of processes that serve."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from cluster import assemble
from cluster.ray.controller import ControllerActor
from cluster.transport import engine_process
from cluster.transport.zmq_sockets import Endpoint
from protos.config.engine import EngineConfig, ModelConfig, to_json
from runtime.core.controller import LocalInbox

FREEZE = """
import gc
from runtime.heap import freeze_heap

class Cycle:
    def __init__(self):
        self.itself = self

garbage, kept = [Cycle() for _ in range(1000)], [Cycle() for _ in range(1000)]
del garbage
freeze_heap()
left = [found for found in gc.get_objects() if isinstance(found, Cycle)]
print(len(left), gc.get_freeze_count() > 1000)
later = Cycle()
del later
print(gc.collect())
"""


def test_what_exists_is_left_out_of_later_collections() -> None:
    """Garbage is freed first, and garbage that is made later is found."""
    ran = subprocess.run([sys.executable, "-c", FREEZE], capture_output=True, text=True, check=True)
    left, frozen, collected = ran.stdout.split()
    assert (left, frozen) == ("0", "True")
    assert int(collected) >= 1


@pytest.mark.parametrize("backend", ["process", "Ray"])
def test_controllers_freeze_what_they_have_loaded(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def build(*_: object) -> SimpleNamespace:
        done.append("built")
        return SimpleNamespace(controller="the controller")

    monkeypatch.setattr(assemble, "build", build)
    monkeypatch.setattr(assemble, "freeze_heap", lambda: done.append("frozen"))
    config, inbox = EngineConfig(ModelConfig("m")), LocalInbox()
    if backend == "Ray":
        placement = cast(Any, None)
        actor = ControllerActor(to_json(config), msgspec.msgpack.encode(Endpoint("", "")), placement, {}, "")
        made: object = actor._build(cast(Any, inbox), print)
    else:
        made = engine_process.build(to_json(config), inbox, print)
    assert made == "the controller"
    assert done == ["built", "frozen"]
