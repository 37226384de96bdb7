"""The engines of `LLM`: in the caller's thread, or in another process, reached through a channel."""

import asyncio
import atexit
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn, Protocol

from cluster import assemble
from cluster.channels import ray_channel
from protos.config.engine import EngineConfig
from protos.errors import EngineDeadError, SlipstreamError
from protos.messages import Abort, Request, TokenOutput, WorkerInfo
from protos.progress import ProgressCallback
from protos.stats import EngineStats
from runtime.core.controller import LocalInbox
from runtime.frontend.async_engine import START_ERRORS
from runtime.frontend.channel import IDLE_S, Channel, Commands, Failed, LoadProgress, Outputs, Ready, Report
from runtime.text.preprocessor import Preprocessor
from runtime.text.tokenizer import load_tokenizer

SILENCE_S = 30.0
"""A loading stage is reported again after this long without progress."""

SNAPSHOT_S = 3 * IDLE_S
"""An idle engine publishes its counters within this time."""

SHUT_DOWN = "the engine was shut down"

Reports = queue.Queue[Report | SlipstreamError]


class Engine(Protocol):
    """Serves the requests of one caller, or of several threads that take turns."""

    turn: threading.RLock
    """Held by the thread that steps."""

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer; None with `skip_tokenizer_init`."""
        ...

    @property
    def preprocessor(self) -> Preprocessor:
        """Makes requests from prompts."""
        ...

    @property
    def info(self) -> WorkerInfo:
        """Sizes and limits reported by the loaded workers."""
        ...

    def put(self, requests: Sequence[Request]) -> None:
        """Add requests; they are served from the next step on.

        Raises:
            EngineDeadError: the engine has ended.
        """
        ...

    def abort(self, request_ids: Sequence[str], on_outputs: Callable[[list[TokenOutput]], None]) -> None:
        """Abort requests; outputs of others that come of it are passed to *on_outputs*, before any later ones."""
        ...

    def has_aborts(self) -> bool:
        """Whether aborts came during a step and wait for another; `abort` of nothing runs it."""
        ...

    def step(self) -> list[TokenOutput]:
        """Return the next outputs, possibly none.

        Raises:
            EngineDeadError: the engine has ended; see `final_outputs`.
        """
        ...

    @property
    def final_outputs(self) -> list[TokenOutput]:
        """The final outputs of the requests that ran when the engine died."""
        ...

    def stats(self) -> EngineStats:
        """Return a snapshot of the engine's counters and gauges."""
        ...

    def shutdown(self) -> None:
        """Free everything. May be called twice."""
        ...


class LocalEngine:
    """Runs the controller in the caller's thread: each `step` is one round."""

    def __init__(self, config: EngineConfig, report: ProgressCallback) -> None:
        self._inbox = LocalInbox()
        self.assembled = assemble.build(config, self._inbox, report)
        self.info = self.assembled.info
        self.tokenizer = self.assembled.tokenizer
        self.preprocessor = self.assembled.preprocessor
        # Bound methods: one call less in the path of each step.
        self.put: Callable[[Sequence[Request]], None] = self._inbox.put
        self.step: Callable[[], list[TokenOutput]] = self.assembled.controller.step
        self.stats, self.has_aborts = self.assembled.controller.stats, self._inbox.has_aborts
        self.turn = threading.RLock()
        self._has_ended = False

    def abort(self, request_ids: Sequence[str], on_outputs: Callable[[list[TokenOutput]], None]) -> None:
        """See `Engine`. During a step, as when a reader is collected within one, they wait for `has_aborts`."""
        self._inbox.put([Abort(tuple(request_ids))])
        if not self.turn.acquire(blocking=False):
            return
        try:
            if not (self.assembled.controller.is_stepping or self._has_ended):
                on_outputs(self.step())
        finally:
            self.turn.release()

    def shutdown(self) -> None:
        """See `Engine`."""
        self._has_ended = True
        self.put = self.step = _refuse
        with self.turn:
            self.assembled.shutdown()

    @property
    def final_outputs(self) -> list[TokenOutput]:
        """See `Engine`."""
        return self.assembled.controller.final_outputs


def _refuse(*_: object) -> NoReturn:
    raise EngineDeadError(SHUT_DOWN)


class ChannelEngine:
    """An engine whose controller runs elsewhere. An event loop in a background thread exchanges commands and reports.

    Ends with `shutdown`, with its last reference, or with the interpreter.

    Args:
        config: the controller's configuration.
        channel: to the controller; owned by this engine.
        report: called with a line for each stage of loading.

    Raises:
        ConfigError, ModelError, PlacementError: the controller could not be built.
        EngineDeadError: the controller ended for another reason.
    """

    def __init__(self, config: EngineConfig, channel: Channel, report: ProgressCallback) -> None:
        self._reports: Reports = queue.Queue()
        self._held: deque[Report | SlipstreamError] = deque()  # received while `stats` waited for a snapshot
        self._stats, self._num_tokens = EngineStats(), 0
        self._failure: SlipstreamError | None = None
        self.turn = threading.RLock()
        self.final_outputs: list[TokenOutput] = []
        self._thread = _ChannelThread(channel)
        self._end = weakref.finalize(self, self._thread.close)
        self._end.atexit = False  # registered below instead, so that it runs before Ray shuts down
        atexit.register(self._end)
        try:
            self.info = self._start(report)
            self.tokenizer = None if config.model.skip_tokenizer_init else load_tokenizer(config.model)
            self.preprocessor = assemble.make_preprocessor(config, self.info, self.tokenizer)
        except BaseException:
            self.shutdown()
            raise

    def _start(self, report: ProgressCallback) -> WorkerInfo:
        """Wait until the engine serves and return its info; report its stages meanwhile."""
        self._thread.start(self._reports)
        stage, since = "the engine", time.monotonic()
        while True:
            try:
                message = self._reports.get(timeout=SILENCE_S)
            except queue.Empty:
                report(f"still waiting after {time.monotonic() - since:.0f} s for: {stage}")
                continue
            if isinstance(message, Ready):
                return message.info
            if isinstance(message, LoadProgress):
                stage, since = message.text, time.monotonic()
                report(stage)
            else:
                self._handle(message)

    def put(self, requests: Sequence[Request]) -> None:
        """See `Engine`."""
        self._check()
        try:
            self._thread.send(Commands.start(requests))
        except RuntimeError:  # the event loop is closed, if another thread shuts the engine down now
            self._check()
            raise

    def abort(self, request_ids: Sequence[str], on_outputs: Callable[[list[TokenOutput]], None]) -> None:
        """See `Engine`. Does not wait; later outputs of these requests are dropped."""
        if self._failure is None:
            with suppress(RuntimeError):  # as above
                self._thread.send(Commands(aborts=tuple(request_ids)))

    def has_aborts(self) -> bool:
        """See `Engine`. They are in the other process."""
        return False

    def step(self) -> list[TokenOutput]:
        """See `Engine`."""
        self._check()
        return self._handle(self._held.popleft() if self._held else self._reports.get())

    def _check(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))

    def _handle(self, report: Report | SlipstreamError) -> list[TokenOutput]:
        if isinstance(report, Outputs):
            self._stats = report.stats or self._stats
            self._num_tokens += sum(len(output.token_ids) for output in report.outputs)
            return report.outputs
        if isinstance(report, Failed):
            self._failure = START_ERRORS.get(report.kind, EngineDeadError)(report.reason)
        elif isinstance(report, SlipstreamError):
            self._failure = report
        self._check()
        return []

    def stats(self) -> EngineStats:
        """See `Engine`. Waits for a snapshot that counts every token which `step` has returned, if no thread steps."""
        if not self.turn.acquire(blocking=False):
            return self._stats
        try:
            return self._awaited_stats()
        finally:
            self.turn.release()

    def _awaited_stats(self) -> EngineStats:
        deadline = time.monotonic() + SNAPSHOT_S
        while self._failure is None and self._stats.generated_tokens < self._num_tokens:
            try:
                report = self._reports.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if isinstance(report, Outputs):
                self._stats = report.stats or self._stats
            self._held.append(report)
        return self._stats

    def shutdown(self) -> None:
        """See `Engine`."""
        self._failure = self._failure or EngineDeadError(SHUT_DOWN)
        atexit.unregister(self._end)
        self._end()
        self._reports.put(self._failure)  # a thread may wait for a report


class _ChannelThread:
    """Runs a channel on an event loop in a thread."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="slipstream-channel", daemon=True)
        self._thread.start()

    def start(self, reports: "Reports") -> None:
        """Start the channel; its reports, or the error of starting it, go into *reports*."""
        asyncio.run_coroutine_threadsafe(self._start(reports), self._loop)

    async def _start(self, reports: "Reports") -> None:
        try:
            await self._channel.start(reports.put)
        except SlipstreamError as error:
            reports.put(error)
        except Exception as error:
            reports.put(EngineDeadError(f"the engine could not be started: {type(error).__name__}: {error}"))

    def send(self, commands: Commands) -> None:
        """Send *commands*."""
        self._loop.call_soon_threadsafe(self._channel.send, commands)

    def close(self) -> None:
        """Close the channel and end the thread. Blocks."""
        asyncio.run_coroutine_threadsafe(self._channel.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def make_engine(config: EngineConfig, report: ProgressCallback) -> Engine:
    """Build an engine: in the caller's thread for the executor `uni`, else with its controller on Ray."""
    if config.parallel.executor == "uni":
        return LocalEngine(config, report)
    return ChannelEngine(config, ray_channel(config), report)
