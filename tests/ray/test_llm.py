"""The whole engine on Ray: the tokens of `uni` when workers die or freeze, and no resource leaks."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cluster.ray.cluster import available_resources
from cluster.settings import engine_config
from cluster.transport.process_workers import BODY
from protos.errors import EngineDeadError, EngineStalledError, ModelError, PlacementError
from runtime.frontend.controller_loop import STATS_EVERY_S
from runtime.text.tokenizer import load_tokenizer
from slipstream import LLM
from tests.support.distributed.ray_engine import LENGTH, PARAMS, PROMPTS, RECOVERY_S, SMALL, Pair, Running, Texts
from tests.support.identity import perturbed
from tests.support.models import tiny_pairs
from tests.support.policies import always
from tests.support.processes import is_running, wait_gone, wait_until


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    target, _ = tiny_pairs.build(folder, "llama")
    draft = perturbed(target, folder / "near", scale=0.05)
    load_tokenizer(engine_config({"model": str(target)}).model).save_pretrained(draft)
    return Pair(target, draft)


@pytest.fixture(scope="module")
def undisturbed(pair: Pair) -> Texts:
    """The outputs of `uni` without speculation."""
    with LLM(str(pair.target), **SMALL) as llm:
        return ids_of(llm)


def ids_of(llm: LLM) -> Texts:
    return [result.outputs[0].token_ids for result in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def free() -> dict[str, float]:
    """Return what the cluster has left: other tests' engines may still have their places."""
    left = available_resources()
    return {name: left.get(name, 0.0) for name in ("CPU", "GPU")}


@pytest.fixture
def gives_back(ray_cluster: Any) -> Iterator[None]:
    """See that a test leaves the cluster as free as it was."""
    before = free()
    yield
    wait_until(lambda: free() == before, what=f"{before} free")


@pytest.fixture(scope="module")
def running(ray_cluster: Any, pair: Pair) -> Iterator[Running]:
    """Two target ranks and a draft, on logical GPUs."""
    arguments = {"tensor_parallel_size": 2, "speculative_config": always(pair.speculation()), **SMALL}
    before = free()
    running = Running(engine_config({"model": str(pair.target), **arguments}))
    wait_until(lambda: free()["GPU"] == before["GPU"] - 3)
    yield running
    controller = running.pid("controller")
    running.close()
    wait_gone([controller])
    wait_until(lambda: free() == before)


Start = Callable[..., Running]


@pytest.fixture
def start(gives_back: None, pair: Pair) -> Iterator[Start]:
    """Start engines with a draft, by default with two target ranks; they end with the test."""
    started: list[Running] = []

    def start(body: str = BODY, **arguments: Any) -> Running:
        given = {"tensor_parallel_size": 2, "speculative_config": always(pair.speculation()), **SMALL, **arguments}
        started.append(Running(engine_config({"model": str(pair.target), **given}), body))
        return started[-1]

    yield start
    for running in started:
        running.close()


def test_one_rank_says_what_uni_says(gives_back: None, pair: Pair, undisturbed: Texts) -> None:
    with LLM(str(pair.target), distributed_executor_backend="ray", **SMALL) as llm:
        assert ids_of(llm) == undisturbed
        stats = llm.stats()
        assert (stats.proposed, stats.generated_tokens) == (0, 16 * LENGTH)
        stream = llm.stream(PROMPTS[0], PARAMS[0])
        next(stream)
        stream.close()
        first = llm.stream(PROMPTS[1], PARAMS[1])
        head = list(next(first).token_ids)
        assert llm.generate(PROMPTS[2], PARAMS[2], use_tqdm=False)[0].outputs[0].token_ids == undisturbed[2]
        assert llm.stats().generated_tokens > stats.generated_tokens
        assert head + [token for output in first for token in output.token_ids] == undisturbed[1]
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate("too late", PARAMS[0])


def test_two_ranks_and_a_draft_say_what_uni_says(running: Running, undisturbed: Texts) -> None:
    before = running.engine.stats()
    assert running.stream() == undisturbed
    running.until(lambda: running.engine.stats().num_running == 0)
    after = running.engine.stats()
    assert after.proposed - before.proposed > after.accepted - before.accepted > 0
    assert any("placed: controller, target rank 0, target rank 1, draft on node" in line for line in running.said)


def test_a_killed_draft_costs_no_token_and_comes_back(running: Running, undisturbed: Texts) -> None:
    lost, revived, before = running.changes("lost"), running.changes("revived"), running.proposed()
    pid = newest_draft(running)
    noticed: list[float] = []

    def kill() -> None:
        os.kill(pid, signal.SIGKILL)
        noticed.append(time.monotonic())

    assert running.stream({500: kill}) == undisturbed
    running.until(lambda: running.changes("lost") > lost, 1.0 + STATS_EVERY_S)
    assert running.proposed() > before
    running.until(lambda: running.changes("revived") > revived)
    before = running.proposed()
    assert running.stream() == undisturbed
    assert running.proposed() > before


def newest_draft(running: Running) -> int:
    lives = running.changes("lost")
    return running.pid("draft" if not lives else f"draft (restart {lives})")


@pytest.mark.parametrize("lost", [1, 0])
def test_a_killed_target_rank_is_replaced_alone_and_costs_no_token(
    running: Running, undisturbed: Texts, lost: int
) -> None:
    before, losses = running.proposed(), running.engine.stats().target_losses
    victim, other = f"target rank {lost}", "target rank 0" if lost else "target rank 1 (restart 1)"
    pid, kept = running.pid(victim), running.pid(other)
    assert running.stream({400: lambda: os.kill(pid, signal.SIGKILL)}) == undisturbed
    assert running.engine.stats().target_losses == losses + 1
    wait_gone([pid])
    assert running.pid(other) == kept
    assert running.pid(f"{victim} (restart 1)") != pid
    running.until(lambda: running.changes("revived") > 0)
    assert running.proposed() > before
    before = running.proposed()
    assert running.stream() == undisturbed
    assert running.proposed() > before


def test_a_spare_takes_over_from_a_lost_rank(start: Start, undisturbed: Texts) -> None:
    running = start(spare_workers=1)
    running.until(lambda: len(running.spares()) == 1)
    (spare,), lost = running.spares(), running.pid("target rank 1")
    assert running.stream({400: lambda: os.kill(lost, signal.SIGKILL)}) == undisturbed
    assert running.pid("target rank 1 (restart 1)") == spare
    running.until(lambda: len(running.spares()) == 1)
    assert running.spares() != [spare]
    assert running.stream() == undisturbed


def test_front_ends_hear_of_a_dead_controller_within_two_seconds(start: Start) -> None:
    running = start(tensor_parallel_size=1, distributed_executor_backend="ray")
    pids = [running.pid(who) for who in ("controller", "target rank 0", "draft")]
    killed: list[float] = []

    def kill() -> None:
        os.kill(pids[0], signal.SIGKILL)
        killed.append(time.monotonic())

    with pytest.raises(EngineDeadError, match="the controller is gone: its process ended"):
        running.stream({200: kill})
    assert time.monotonic() - killed[0] < 2.0
    wait_gone(pids)
    assert not running.engine.is_alive


@pytest.mark.full
def test_a_frozen_controller_is_noticed_and_continues_or_is_given_up(start: Start, undisturbed: Texts) -> None:
    running = start(tensor_parallel_size=1, distributed_executor_backend="ray")
    pids = [running.pid(who) for who in ("controller", "target rank 0", "draft")]
    stopped: list[float] = []

    def freeze() -> None:
        os.kill(pids[0], signal.SIGSTOP)
        stopped.append(time.monotonic())

    with pytest.raises(EngineStalledError, match="has sent nothing"):
        running.stream({500: freeze})
    assert time.monotonic() - stopped[0] < 10.0
    assert running.engine.state == "stalled"
    os.kill(pids[0], signal.SIGCONT)
    running.until(lambda: running.engine.state in ("live", "degraded"))
    assert running.stream() == undisturbed
    os.kill(pids[0], signal.SIGSTOP)
    running.until(lambda: running.engine.state == "dead", 60.0)
    wait_gone(pids)


@pytest.mark.full
def test_what_the_workers_find_wrong_is_told_as_it_is(gives_back: None, pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        LLM(str(tmp_path / "nowhere"), skip_tokenizer_init=True, distributed_executor_backend="ray", **SMALL)
    with pytest.raises(PlacementError, match="needs 9 GPUs and 10 CPUs on one node, the cluster has 8 GPUs"):
        LLM(str(pair.target), tensor_parallel_size=9, placement_timeout_s=0.5, **SMALL)


@pytest.mark.full
@pytest.mark.parametrize("who", ["draft", "target rank 1", "target rank 0"])
def test_a_frozen_worker_costs_no_token(start: Start, undisturbed: Texts, who: str) -> None:
    running = start()
    pid, stopped, heard = running.pid(who), [0.0], [0.0]

    def is_noticed() -> bool:
        return bool(running.changes("lost") if who == "draft" else running.engine.stats().target_losses)

    def freeze() -> None:
        os.kill(pid, signal.SIGSTOP)
        stopped[0] = time.monotonic()

    async def watch() -> None:
        while not is_noticed():  # noqa: ASYNC110 - snapshots come without an event
            await asyncio.sleep(0.02)
        heard[0] = time.monotonic()

    watching = running._loop.create_task(watch())
    assert running.stream({500: freeze}) == undisturbed
    running.until(is_noticed)
    running.do(asyncio.wait_for(watching, 1.0))
    assert 0 < heard[0] - stopped[0] < 5.0 + STATS_EVERY_S
    wait_gone([pid])
    assert running.proposed() > 0
    if who == "draft":
        running.until(lambda: running.changes("revived") > 0)
    before = running.proposed()
    assert running.stream() == undisturbed
    assert running.proposed() > before


@pytest.mark.full
def test_a_spare_that_is_frozen_is_replaced_when_it_should_take_over(start: Start, undisturbed: Texts) -> None:
    running = start(spare_workers=1, tensor_parallel_size=1)
    running.until(lambda: len(running.spares()) == 1)
    (spare,), lost = running.spares(), running.pid("target rank 0")
    os.kill(spare, signal.SIGSTOP)
    began = time.monotonic()
    assert running.stream({400: lambda: os.kill(lost, signal.SIGKILL)}) == undisturbed
    assert time.monotonic() - began < RECOVERY_S
    assert running.pid("target rank 0 (restart 2)")
    wait_gone([spare])


@pytest.mark.full
def test_a_draft_frozen_for_ten_seconds_and_continued(start: Start, undisturbed: Texts) -> None:
    running = start()
    pid = running.pid("draft")
    for _ in range(2):
        assert running.stream({500: partial(os.kill, pid, signal.SIGSTOP)}) == undisturbed
        time.sleep(10)
        if is_running(pid):
            os.kill(pid, signal.SIGCONT)
        assert running.stream() == undisturbed
        running.until(lambda: running.changes("started") + running.changes("revived") > running.changes("lost"))
        pid = newest_draft(running)
    before = running.proposed()
    assert running.stream() == undisturbed
    assert running.proposed() > before


@pytest.mark.full
def test_a_draft_that_is_late_in_every_round(start: Start, undisturbed: Texts) -> None:
    running = start("tests.support.distributed.bodies:slow_draft")
    assert running.stream() == undisturbed
    running.until(lambda: running.changes("late") > 0)
    assert running.changes("late") <= 3  # reported once per outage, not per round
