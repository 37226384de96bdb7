"""The async engine over both of its channels: streams, aborts, the end of the other side."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from protos.errors import DrainingError, EngineDeadError, InvalidRequestError, ModelError
from protos.sampling import SamplingParams
from runtime.frontend.async_engine import AsyncEngine
from runtime.frontend.process_channel import ProcessChannel
from runtime.metrics.prometheus import Metrics
from runtime.subprocess import python_command
from tests.runtime.test_metrics import scraped
from tests.support.serving import fake_engine
from tests.support.serving.fake_engine import expected, local_engine, make_preprocessor

LONG = 200_000


def process_channel(model: str = "fake", max_model_len: int = 512) -> ProcessChannel:
    config = json.dumps({"model": {"model": model, "max_model_len": max_model_len}})
    return ProcessChannel(python_command("tests.support.serving.fake_engine"), config)


def process_engine() -> AsyncEngine:
    return AsyncEngine(process_channel(), make_preprocessor)


@asynccontextmanager
async def started(engine: AsyncEngine) -> AsyncIterator[AsyncEngine]:
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def text_of(engine: AsyncEngine, prompt: str, name: str, **options: object) -> str:
    params = SamplingParams(**{"max_tokens": 8, **options})
    return "".join([delta.output.text async for delta in engine.generate(prompt, params, name)])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - snapshots come without an event
            await asyncio.sleep(0.01)


def run(test: Coroutine[None, None, None]) -> None:
    asyncio.run(test)


@pytest.mark.parametrize("make", [local_engine, process_engine], ids=["thread", "process"])
def test_concurrent_requests_get_their_own_answers(make: Callable[[], AsyncEngine]) -> None:
    async def check() -> None:
        async with started(make()) as engine:
            prompts = [f"prompt number {i}" for i in range(20)]
            texts = await asyncio.gather(*(text_of(engine, p, f"r{i}") for i, p in enumerate(prompts)))
            assert texts == [expected(p, 8) for p in prompts]
            await until(lambda: engine.stats().generated_tokens == 160 and engine.stats().num_running == 0)

    run(check())


def test_samples_of_one_prompt_are_told_apart() -> None:
    async def check() -> None:
        async with started(local_engine()) as engine:
            params = SamplingParams(n=3, max_tokens=5)
            counts = [0, 0, 0]
            async for delta in engine.generate("hello", params, "three"):
                counts[delta.index] += len(delta.output.token_ids)
            assert counts == [5, 5, 5]

    run(check())


def test_a_closed_stream_is_aborted_and_its_blocks_freed() -> None:
    async def check() -> None:
        async with started(local_engine(max_model_len=LONG)) as engine:
            stream = engine.generate("endless", SamplingParams(max_tokens=LONG // 2), "long")
            await anext(stream)
            await until(lambda: engine.stats().num_running == 1)
            await stream.aclose()
            await until(lambda: engine.stats().num_running == 0)
            assert engine.stats().generated_tokens < LONG // 2
            assert await text_of(engine, "next", "r") == expected("next", 8)

    run(check())


@pytest.mark.parametrize("make", [local_engine, process_engine], ids=["thread", "process"])
def test_an_id_may_be_used_again_at_once(make: Callable[[], AsyncEngine]) -> None:
    """Outputs of the aborted request are on their way when the next one begins."""

    async def check() -> None:
        async with started(make()) as engine:
            for number in range(10):
                stream = engine.generate("endless", SamplingParams(max_tokens=400), "same")
                await anext(stream)
                await stream.aclose()
                assert await text_of(engine, f"next {number}", "same") == expected(f"next {number}", 8)

    run(check())


def test_a_cancelled_waiter_is_aborted() -> None:
    async def check() -> None:
        async with started(local_engine(max_model_len=LONG)) as engine:
            task = asyncio.create_task(text_of(engine, "endless", "long", max_tokens=LONG // 2))
            await until(lambda: engine.stats().num_running == 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until(lambda: engine.stats().num_running == 0)
            assert engine.stats().kv_usage < 0.5

    run(check())


def test_bad_requests_disturb_no_other() -> None:
    async def check() -> None:
        async with started(local_engine()) as engine:
            good = asyncio.create_task(text_of(engine, "good", "good"))
            with pytest.raises(InvalidRequestError, match="prompt has 600 tokens"):
                await text_of(engine, [5] * 600, "bad")  # type: ignore[arg-type]
            assert await good == expected("good", 8)
            stream = engine.generate("twice", SamplingParams(max_tokens=400), "same")
            await anext(stream)
            with pytest.raises(InvalidRequestError, match="'same' is already being answered"):
                await text_of(engine, "twice", "same")
            await stream.aclose()

    run(check())


def test_a_failing_executor_ends_every_request_and_the_engine() -> None:
    async def check() -> None:
        async with started(local_engine(max_model_len=LONG)) as engine:
            other = asyncio.create_task(text_of(engine, "endless", "long", max_tokens=LONG // 2))
            await until(lambda: engine.stats().num_running == 1)
            with pytest.raises(EngineDeadError, match="RuntimeError"):
                await text_of(engine, "raise an error", "bad")
            with pytest.raises(EngineDeadError):
                await other
            assert not engine.is_alive
            with pytest.raises(EngineDeadError):
                await text_of(engine, "too late", "late")

    run(check())


@pytest.mark.parametrize("how", ["prompt", "signal"])
def test_a_dead_child_is_noticed_at_once(how: str) -> None:
    async def check() -> None:
        channel, metrics = process_channel(max_model_len=LONG), Metrics("m")
        async with started(AsyncEngine(channel, make_preprocessor, metrics)) as engine:
            waiting = asyncio.create_task(text_of(engine, "endless", "long", max_tokens=LONG // 2))
            await until(lambda: engine.stats().num_running == 1)
            if how == "signal":
                assert channel.pid is not None
                os.kill(channel.pid, signal.SIGKILL)
            else:
                with pytest.raises(EngineDeadError, match="exit code 9"):
                    await text_of(engine, fake_engine.POISON, "poison")
            async with asyncio.timeout(5):
                with pytest.raises(EngineDeadError, match="signal 9" if how == "signal" else "exit code 9"):
                    await waiting
            assert not engine.is_alive
        num_lost = 1 if how == "signal" else 2
        counted = {
            name: value for name, value in scraped(metrics).items() if name[0] == "slipstream_request_success_total"
        }
        assert {reason: value for (_, reason), value in counted.items() if value} == {"error": num_lost}

    run(check())


def test_a_child_that_cannot_load_says_why() -> None:
    async def check() -> None:
        engine = AsyncEngine(process_channel("refuse"), make_preprocessor)
        with pytest.raises(ModelError, match="there is no such model"):
            await engine.start()
        await engine.close()

    run(check())


def test_progress_is_reported_and_nothing_is_left_over() -> None:
    async def check() -> None:
        said: list[str] = []
        channel = process_channel()
        engine = AsyncEngine(channel, make_preprocessor)
        await engine.start(said.append)
        pid = channel.pid
        folder = channel._folder
        assert folder.stat().st_mode & 0o077 == 0
        await engine.close()
        assert said == ["loading nothing"]
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert not folder.exists()

    run(check())


@pytest.mark.parametrize(
    ("drains", "error", "reason"), [(False, EngineDeadError, "error"), (True, DrainingError, "abort")]
)
def test_closing_ends_streams_in_flight(drains: bool, error: type[Exception], reason: str) -> None:
    async def check() -> None:
        metrics = Metrics("m")
        engine = AsyncEngine(process_channel(max_model_len=LONG), make_preprocessor, metrics)
        await engine.start()
        waiting = asyncio.create_task(text_of(engine, "endless", "long", max_tokens=LONG // 2))
        await until(lambda: engine.stats().num_running == 1)
        if drains:
            engine.drain()
        await engine.close()
        with pytest.raises(error, match=r"shut down|stopped"):
            await waiting
        found = scraped(metrics)
        assert found["slipstream_request_success_total", reason] == 1
        assert found["slipstream_requests_turned_away_total", "draining"] == drains

    run(check())


PARENT = """
import asyncio, os, signal, sys
sys.path[:0] = {path!r}
from tests.runtime import test_async_engine
from runtime.frontend.async_engine import AsyncEngine

async def main():
    channel = test_async_engine.process_channel()
    await AsyncEngine(channel, test_async_engine.make_preprocessor).start()
    print(channel._folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_a_child_dies_with_its_parent() -> None:
    code = PARENT.format(path=[str(Path(__file__).parents[2])])
    # The child holds the same standard output: this returns only when both are gone.
    ran = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=60, check=False)
    assert ran.returncode == -signal.SIGKILL
    assert not Path(ran.stdout.decode().strip()).exists()


def test_a_stopped_child_dies_with_its_parent() -> None:
    code = PARENT.format(path=[str(Path(__file__).parents[2])])
    stopping = code.replace("    print(", "    os.kill(channel.pid, signal.SIGSTOP)\n    print(")
    ran = subprocess.run([sys.executable, "-c", stopping], stdout=subprocess.PIPE, timeout=60, check=False)
    assert ran.returncode == -signal.SIGKILL
    assert not Path(ran.stdout.decode().strip()).exists()
