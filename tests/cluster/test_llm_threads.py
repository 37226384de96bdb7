"""`LLM` called by several threads, within its own steps, and after `shutdown`."""

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cluster.engine import ChannelEngine
from cluster.settings import engine_config
from protos.errors import EngineDeadError
from protos.messages import RoundPlan, TokenOutput, Verdict
from protos.sampling import SamplingParams
from runtime.frontend.channel import Commands, Ready
from slipstream import LLM
from tests.support.models import tiny_pairs
from tests.support.policies import always
from tests.support.processes import wait_until
from tests.support.scheduling import INFO

SMALL = {"dtype": "float32", "num_gpu_blocks_override": 128, "enforce_eager": True, "max_num_seqs": 8}
PROMPTS = ["The future of AI is", "def main():", "x", "while"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
Start = Callable[[], LLM]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    target, draft = tiny_pairs.build(tmp_path_factory.mktemp("pair"), "llama")
    speculative = always({"model": str(draft), "num_speculative_tokens": 3})
    return lambda: LLM(str(target), speculative_config=speculative, **SMALL)


@pytest.fixture
def llm(start: Start) -> Iterator[LLM]:
    with start() as llm:
        yield llm


def answer(llm: LLM, prompts: Sequence[str]) -> list[Sequence[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(prompts, GREEDY, use_tqdm=False)]


def test_threads_share_an_engine(llm: LLM) -> None:
    expected = answer(llm, PROMPTS)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: answer(llm, PROMPTS), range(12)))
    assert found == [expected] * 12
    assert not llm._arrived


def test_only_one_thread_steps_at_a_time(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, inside = llm._engine.assembled.executor, []  # type: ignore[attr-defined]
    run, most, together = executor.run, [], threading.Barrier(3)

    def counted(plan: RoundPlan) -> list[Verdict]:
        inside.append(plan)
        most.append(len(inside))
        try:
            return list(run(plan))
        finally:
            inside.pop()

    def begin(_: int) -> None:
        together.wait()
        answer(llm, PROMPTS)

    monkeypatch.setattr(executor, "run", counted)
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(begin, range(3)))
    assert max(most) == 1


def test_a_reader_collected_within_a_step_begins_no_other(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answer(llm, PROMPTS)
    executor, depth = llm._engine.assembled.executor, []  # type: ignore[attr-defined]
    run = executor.run
    left: list[Any] = [llm.stream(PROMPTS[0], GREEDY)]
    next(left[0])

    def collecting(plan: RoundPlan) -> list[Verdict]:
        assert not depth, "a step within a step"
        depth.append(plan)
        left.clear()
        gc.collect()
        verdicts = run(plan)
        depth.pop()
        return list(verdicts)

    monkeypatch.setattr(executor, "run", collecting)
    assert answer(llm, PROMPTS) == expected
    assert (llm.stats().num_running, llm.stats().num_waiting) == (0, 0)


def test_what_an_abort_brings_is_kept_for_its_readers_before_another_thread_steps(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    distribute, is_turn = llm._distribute, list[bool]()

    def watched(outputs: Sequence[TokenOutput]) -> None:
        is_turn.append(llm._engine.turn._is_owned())  # type: ignore[attr-defined]
        distribute(outputs)

    ended, other = llm.stream(PROMPTS[0], GREEDY), llm.stream(PROMPTS[1], GREEDY)
    next(ended)
    found = list(next(other).token_ids)
    monkeypatch.setattr(llm, "_distribute", watched)
    ended.close()
    assert is_turn == [True]
    found += [token for output in other for token in output.token_ids]
    assert [found] == answer(llm, PROMPTS[1:2])


def test_an_answer_that_has_come_is_returned_though_the_engine_ends_with_an_abort_after_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise EngineDeadError("out of luck")

    monkeypatch.setattr(llm._engine, "has_aborts", lambda: True)
    monkeypatch.setattr(llm._engine, "abort", fail)
    (output,) = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    assert output.finished


def test_an_abort_during_the_last_step_of_another_thread_frees_its_place_at_once(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = llm._engine.assembled.executor  # type: ignore[attr-defined]
    run, last, may_end = executor.run, threading.Event(), threading.Event()
    left = llm.stream(PROMPTS[0], GREEDY)
    next(left)
    monkeypatch.setattr(executor, "run", lambda plan: (last.set(), may_end.wait(), run(plan))[-1])
    one_token = SamplingParams(temperature=0.0, max_tokens=1)
    with ThreadPoolExecutor(1) as threads:
        answered = threads.submit(llm.generate, PROMPTS[1], one_token, use_tqdm=False)
        last.wait()
        left.close()
        may_end.set()
        answered.result()
    assert (llm.stats().num_running, llm.stats().kv_usage) == (0, 0.0)


def test_after_shutdown_requests_are_refused(start: Start) -> None:
    llm = start()
    left, closed = (llm.stream(PROMPTS[0], GREEDY) for _ in range(2))
    next(left)
    next(closed)
    llm.shutdown()
    llm.shutdown()
    for call in (lambda: answer(llm, PROMPTS), lambda: list(llm.stream("x", GREEDY)), lambda: list(left)):
        with pytest.raises(EngineDeadError, match="the engine was shut down"):
            call()
    closed.close()
    assert not llm._arrived


def test_shutdown_waits_for_the_step_of_another_thread(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = start()
    engine, began = llm._engine, threading.Event()
    executor = engine.assembled.executor  # type: ignore[attr-defined]
    run = executor.run

    def slow(plan: RoundPlan) -> list[Verdict]:
        began.set()
        wait_until(lambda: engine._has_ended)  # type: ignore[attr-defined]
        return list(run(plan))

    monkeypatch.setattr(executor, "run", slow)
    with ThreadPoolExecutor(1) as threads:
        ended = threads.submit(answer, llm, PROMPTS)
        began.wait()
        llm.shutdown()
        with pytest.raises(EngineDeadError, match="the engine was shut down"):
            ended.result()


class SilentChannel:
    """To a controller that is ready, and never answers."""

    async def start(self, on_report: Callable[[Any], None]) -> None:
        on_report(Ready(INFO))

    def send(self, commands: Commands) -> None:
        pass

    async def close(self) -> None:
        pass


def test_shutdown_ends_the_wait_for_another_process() -> None:
    engine = ChannelEngine(engine_config({"skip_tokenizer_init": True}), SilentChannel(), lambda line: None)
    errors: list[Exception] = []

    def read() -> None:
        with engine.turn:
            began.set()
            try:
                engine.step()
            except EngineDeadError as error:
                errors.append(error)

    began, reading = threading.Event(), threading.Thread(target=read, daemon=True)
    reading.start()
    began.wait()
    assert engine.stats().generated_tokens == 0
    engine.shutdown()
    reading.join(timeout=30)
    assert [str(error) for error in errors] == ["the engine was shut down"]
