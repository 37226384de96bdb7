"""Turns: few at once, one at a time for each key, and keys in turn."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps

import pytest

from protos.errors import OverloadedError
from runtime.frontend.fair_turns import FairTurns


def on_a_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    async def main() -> None:
        await test()

    @wraps(test)
    def run() -> None:
        asyncio.run(main())

    return run


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class Work:
    """Holds turns until it is told to end them; records who had one."""

    def __init__(self, turns: FairTurns) -> None:
        self._turns = turns
        self.began: list[str] = []
        self.running: list[str] = []
        self._ends: dict[str, list[asyncio.Event]] = {}

    async def hold(self, key: str) -> None:
        async with self._turns.turn(key):
            end = asyncio.Event()
            self._ends.setdefault(key, []).append(end)
            self.began.append(key)
            self.running.append(key)
            await end.wait()
            self.running.remove(key)

    async def end(self, key: str) -> None:
        self._ends[key].pop(0).set()
        await settle()


@on_a_loop
async def test_keys_take_turns() -> None:
    work = Work(FairTurns("things", num_at_once=2))
    tasks = [asyncio.create_task(work.hold(key)) for key in "mmmmmab"]
    await settle()
    assert work.running == ["m", "a"], "one at a time for each key"
    await work.end("m")
    assert work.running == ["a", "b"], "the queue of one key is not served before the others"
    for key in "abmmmm":
        await work.end(key)
    assert work.began == ["m", "a", "b", "m", "m", "m", "m"]
    await asyncio.gather(*tasks)


@on_a_loop
async def test_one_key_waits_in_a_queue_of_limited_length() -> None:
    work = Work(FairTurns("things", num_at_once=2, max_waiting=3))
    tasks = [asyncio.create_task(work.hold("m")) for _ in range(4)]
    await settle()
    with pytest.raises(OverloadedError, match="3 things are waiting") as caught:
        await work.hold("m")
    assert caught.value.retry_after_s > 0
    tasks.append(asyncio.create_task(work.hold("a")))
    await settle()
    assert work.running == ["m", "a"], "it is full for one key alone"
    for key in "ammmm":
        await work.end(key)
    await asyncio.gather(*tasks)


@on_a_loop
async def test_whoever_waits_too_long_is_told_when_to_come_back() -> None:
    work = Work(FairTurns("things", longest_s=0.05))
    held = asyncio.create_task(work.hold("m"))
    await settle()
    with pytest.raises(OverloadedError, match="too many things") as caught:
        await work.hold("m")
    assert caught.value.retry_after_s > 0
    await work.end("m")
    await held


@on_a_loop
async def test_who_gives_up_leaves_its_place() -> None:
    work = Work(FairTurns("things"))
    tasks = [asyncio.create_task(work.hold("m")) for _ in range(3)]
    await settle()
    tasks[1].cancel()
    await settle()
    await work.end("m")
    assert work.running == ["m"]
    await work.end("m")
    again = asyncio.create_task(work.hold("m"))
    await settle()
    assert work.running == ["m"]
    await work.end("m")
    await asyncio.gather(again, *tasks, return_exceptions=True)
