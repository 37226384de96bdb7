"""Long texts are tokenised in threads, a few at a time, and not for ever."""

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
    """Owns the threads. They cannot be stopped: what takes too long is refused, and holds its place until it ends.

    Belongs to one event loop. The threads are daemons, so that a text nobody waits for does not hold up the end.

    Args:
        longest_s: how long one text may wait and take, together.
        num_threads: how many are tokenised at once.
    """

    def __init__(self, longest_s: float = LONGEST_S, num_threads: int = NUM_THREADS) -> None:
        self._longest_s = longest_s
        self._places = asyncio.Semaphore(num_threads)

    async def run(self, make: Callable[..., T], *args: Any, **options: Any) -> T:
        """Return what *make* returns.

        Raises:
            InvalidRequestError: it took too long.
            OverloadedError: it did not even begin in time.
        """
        job: asyncio.Future[T] | None = None
        try:
            async with asyncio.timeout(self._longest_s):
                await self._places.acquire()
                job = self._begin(partial(make, *args, **options))
                return await job
        except TimeoutError:
            raise self._too_slow() if job is not None else self._too_busy() from None

    def _begin(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        loop = asyncio.get_running_loop()
        job: asyncio.Future[T] = loop.create_future()

        def act() -> None:
            try:
                outcome = partial(job.set_result, work())
            except Exception as error:
                outcome = partial(job.set_exception, error)
            with contextlib.suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(self._end, job, outcome)

        threading.Thread(target=act, name="slipstream-tokenise", daemon=True).start()
        return job

    def _end(self, job: "asyncio.Future[T]", tell: Callable[[], None]) -> None:
        self._places.release()
        if not job.done():
            tell()

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
