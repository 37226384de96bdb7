"""Tokenises long texts in threads, with limits on their number and duration."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from protos.errors import InvalidRequestError, OverloadedError

T = TypeVar("T")

NUM_THREADS = 4
LONGEST_S = 20.0
RETRY_S = 10.0


class TokenizerPool:
    """Runs tokenisation in daemon threads. Belongs to one event loop.

    A thread cannot be stopped: a text that takes too long is refused, and occupies its thread until it ends.

    Args:
        longest_s: limit on waiting and tokenising one text, in seconds.
        num_threads: number of texts tokenised at once.
    """

    def __init__(self, longest_s: float = LONGEST_S, num_threads: int = NUM_THREADS) -> None:
        self._longest_s = longest_s
        self._slots = asyncio.Semaphore(num_threads)

    async def run(self, work: Callable[..., T], *args: Any, **options: Any) -> T:
        """Return what *work* returns for the arguments.

        Raises:
            InvalidRequestError: it took too long.
            OverloadedError: it did not begin in time.
        """
        job: asyncio.Future[T] | None = None
        try:
            async with asyncio.timeout(self._longest_s):
                await self._slots.acquire()
                job = self._begin(partial(work, *args, **options))
                return await job
        except TimeoutError:
            raise self._too_slow() if job is not None else self._too_busy() from None

    def _begin(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        loop = asyncio.get_running_loop()
        job: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                set_outcome = partial(job.set_result, work())
            except Exception as error:
                set_outcome = partial(job.set_exception, error)
            with contextlib.suppress(RuntimeError):  # the loop may be closed
                loop.call_soon_threadsafe(self._end, job, set_outcome)

        threading.Thread(target=run, name="slipstream-tokenise", daemon=True).start()
        return job

    def _end(self, job: "asyncio.Future[T]", set_outcome: Callable[[], None]) -> None:
        self._slots.release()
        if not job.done():
            set_outcome()

    def _too_slow(self) -> InvalidRequestError:
        return InvalidRequestError(
            f"the prompt took more than {self._longest_s:g} s to tokenise; shorten it, break up what has no spaces, or "
            "pass token ids",
            "prompt",
        )

    def _too_busy(self) -> OverloadedError:
        return OverloadedError(
            f"the server is overloaded: no text could be tokenised for {self._longest_s:g} s; try again later", RETRY_S
        )
