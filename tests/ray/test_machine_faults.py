"""An engine on several machines: cuts of the network, machines that lose their power, and a lost head.

Each line that is printed has its figure. Run it with `pytest -m full -s`; the computer should have nothing else to do.
"""

import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM
from tests.support.distributed.engine import tiny_pair
from tests.support.distributed.machine_engine import PARAMS
from tests.support.distributed.machine_faults import WORKER, MachineEngine, RayMachines, give, ray_machines
from tests.support.distributed.machines import missing
from tests.support.distributed.ray_nodes import PROMPTS, SMALL
from tests.support.processes import wait_until

LACKING = missing()
pytestmark = [pytest.mark.full, pytest.mark.timeout(0), pytest.mark.skipif(bool(LACKING), reason=LACKING)]
REDIS = shutil.which("redis-server")
REDIS_PORT = 6390
SURVIVES_S = 90.0
"""Ray's processes give a lost head 60 s."""
GRPC_NOTICES_S = 300.0
"""Ray's `grpc_client_keepalive_time_ms`: by then at the latest its processes notice a head that is silent."""
LEAVES_S = 60.0
"""What an engine needs to end, once it is lost."""
Answers = list[list[int]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tiny_pair(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def undisturbed(models: tuple[Path, Path]) -> Answers:
    """The answers of one process without speculation, in fp32."""
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    with LLM(str(models[0]), speculative_config=None, **SMALL) as llm:
        return [list(result.outputs[0].token_ids) for result in llm.generate(prompts, PARAMS, use_tqdm=False)]


@contextmanager
def engine_on(
    folder: Path, models: tuple[Path, Path], *names: str, has_draft: bool = True, **arguments: Any
) -> Iterator[tuple[RayMachines, MachineEngine]]:
    """Yield a cluster of a head and machines with room for a worker each, and an engine that streams there."""
    with ray_machines(folder, *names) as cluster:
        began = time.monotonic()
        cluster.start_head()
        cluster.start_others()
        yield cluster, engine_in(cluster, models, has_draft=has_draft, **arguments)
        say("the whole test", time.monotonic() - began)


def engine_in(cluster: RayMachines, models: tuple[Path, Path], *, has_draft: bool, **arguments: Any) -> MachineEngine:
    given = give(cluster, target=models[0], draft=models[1])
    order = {
        "model": given["target"],
        "draft": given["draft"] if has_draft else None,
        "arguments": {"placement_strategy": "SPREAD", "worker_resources": WORKER, **arguments},
    }
    engine = MachineEngine(cluster, order)
    say("ready", engine.wait_streaming())
    return engine


def say(what: str, seconds: float) -> None:
    print(f"{what}: {seconds:.1f} s", flush=True)


def judge(answers: list[dict[str, Any]], undisturbed: Answers) -> Counter[str]:
    """Count the answers that are whole and equal, changed, and ended with an error, by its name; print the counts."""
    counts: Counter[str] = Counter()
    for answer in answers:
        ids = answer.get("ids")
        whole = "equal" if ids == undisturbed[answer["prompt"]] else "changed"
        counts[answer["error"] if ids is None else whole] += 1
    print(f"answers: {dict(counts)}", flush=True)
    return counts


def measure(engine: MachineEngine, what: str, since: float) -> None:
    engine.wait_serving(since)
    print(f"{what}: noticed after {engine.noticed(since):.1f} s, silence {engine.silence(since):.1f} s", flush=True)


def test_a_network_that_is_cut_for_a_while(short_dir: Path, models: tuple[Path, Path], undisturbed: Answers) -> None:
    with engine_on(short_dir, models, "one", "two", has_draft=False, tensor_parallel_size=2) as (_, engine):
        for seconds in (4, 1, 15):
            node, began = engine.machine_of("target rank 1"), time.monotonic()
            node.cut()
            time.sleep(seconds)
            node.join()
            measure(engine, f"target rank 1 cut off for {seconds} s", began)
        counts = judge(engine.stop(), undisturbed)
    assert set(counts) == {"equal"}


def test_machines_that_lose_their_power_and_come_back(
    short_dir: Path, models: tuple[Path, Path], undisturbed: Answers
) -> None:
    with engine_on(short_dir, models, "one", "two", "three", tensor_parallel_size=2, rebuild_timeout_s=20.0) as (
        cluster,
        engine,
    ):
        for lost in (["draft"], ["target rank 1"], ["target rank 0", "target rank 1"]):
            lose_for_a_while(cluster, engine, lost)
        counts = judge(engine.stop(), undisturbed)
    assert set(counts) <= {"equal", "NoRoomError"}
    assert counts["equal"] > 0


def lose_for_a_while(cluster: RayMachines, engine: MachineEngine, lost: list[str]) -> None:
    """Switch the machines of these workers off, and on again when clients were refused for a while."""
    nodes, began = [engine.machine_of(worker) for worker in lost], time.monotonic()
    for node in nodes:
        node.lose_power()
    if lost != ["draft"]:
        told_s = wait_until(lambda: "no room" in engine.outage(), 120, "told that there is no room")
        say("told that there is no room", told_s)
        time.sleep(max(0.0, 40 - told_s))
    for node in nodes:
        node.join()
        cluster.start(node)
    say("the machine is back", time.monotonic() - began)
    measure(engine, f"machine of {' and '.join(lost)} lost", began)


def test_fewer_ranks_where_there_is_no_room_for_all(
    short_dir: Path, models: tuple[Path, Path], undisturbed: Answers
) -> None:
    with engine_on(
        short_dir, models, "one", "two", has_draft=False, tensor_parallel_size=2, min_tensor_parallel_size=1
    ) as (_, engine):
        began = time.monotonic()
        engine.machine_of("target rank 0").switch_off()
        measure(engine, "machine of target rank 0 lost for good, over one rank instead of two", began)
        counts = judge(engine.stop(), undisturbed)
    assert set(counts) == {"equal"}


def test_a_head_that_is_lost_takes_all_with_it_within_a_while(short_dir: Path, models: tuple[Path, Path]) -> None:
    with ray_machines(short_dir, "one", "two") as cluster:
        engine = headless(cluster, models)
        began = time.monotonic()
        cluster.head.lose_power()
        engine.wait_end(GRPC_NOTICES_S + SURVIVES_S + LEAVES_S)
        ended_s, streamed_s = time.monotonic() - began, engine.arrivals()[-1] - began
        say("head lost, no Redis: streams went on for", streamed_s)
        say("the engine's process ended after further", ended_s - streamed_s)
        assert ended_s - streamed_s < LEAVES_S
        print(f"then: {engine.log.read_text().strip().splitlines()[-1][:200]}")


@pytest.mark.skipif(REDIS is None, reason="the head's state on Redis needs Debian's redis-server")
def test_with_redis_streams_outlive_the_head_and_a_new_one_takes_over(
    short_dir: Path, models: tuple[Path, Path], undisturbed: Answers
) -> None:
    with ray_machines(short_dir, "store", "one", "two") as cluster:
        store = cluster.others[0]
        redis = store.start(
            REDIS, "--port", REDIS_PORT, "--protected-mode", "no", "--bind", store.address, "--save", ""
        )
        cluster.head.environment |= {"RAY_REDIS_ADDRESS": f"{store.address}:{REDIS_PORT}"}
        cluster.others = cluster.others[1:]
        engine = headless(cluster, models)
        began = time.monotonic()
        cluster.head.lose_power()
        time.sleep(20)
        say("head lost, with Redis: longest silence meanwhile", engine.silence(began))
        cluster.head.join()
        cluster.start_head(cpus=0)
        say("a new head took over after", time.monotonic() - began)
        time.sleep(max(0.0, SURVIVES_S - (time.monotonic() - began)))
        say("longest silence until Ray would have given up", engine.silence(began))
        lost = time.monotonic()
        node = engine.machine_of("target rank 0")
        (pid,) = [pid for pid, args in node.processes().items() if "WorkerActor" in args and "spare" not in args][:1]
        node.output("kill", "-9", pid)
        measure(engine, "target rank 0 killed under the new head", lost)
        counts = judge(engine.stop(), undisturbed)
        redis.kill()
        redis.wait()
    assert set(counts) == {"equal"}


def headless(cluster: RayMachines, models: tuple[Path, Path]) -> MachineEngine:
    """Start a head that runs no part of the engine, and an engine on the other machines."""
    cluster.start_head(cpus=0)
    first, *others = cluster.others
    cluster.start(first, accel=1, cpus=2)
    for node in others:
        cluster.start(node)
    given = give(cluster, target=models[0])
    arguments = {"placement_strategy": "PACK", "worker_resources": WORKER, "tensor_parallel_size": 1}
    engine = MachineEngine(cluster, {"model": given["target"], "arguments": arguments}, on=first)
    say("ready", engine.wait_streaming())
    return engine
