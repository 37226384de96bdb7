"""Lets a few pieces of work run at once, and callers take turns by key."""

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator

from protos.errors import OverloadedError

NUM_AT_ONCE = 4
MAX_WAITING = 64
"""Most callers that wait with one key."""
LONGEST_S = 10.0
RETRY_S = 5.0


class FairTurns:
    """Gives turns: one at a time to each key, and round robin between keys. Belongs to one event loop.

    Args:
        what: what callers wait for, in the plural, for messages.
        num_at_once: most turns at once.
        max_waiting: most callers that wait with one key.
        longest_s: how long one waits.
    """

    def __init__(
        self,
        what: str,
        num_at_once: int = NUM_AT_ONCE,
        max_waiting: int = MAX_WAITING,
        longest_s: float = LONGEST_S,
    ) -> None:
        self._what, self._free = what, num_at_once
        self._max_waiting, self._longest_s = max_waiting, longest_s
        self._running: set[str] = set()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @contextlib.asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[None]:
        """Hold a turn of *key*.

        Raises:
            OverloadedError: too many callers wait with this key, or the turn did not come in time.
        """
        await self._wait(key)
        try:
            yield
        finally:
            self._running.discard(key)
            self._free += 1
            if key in self._waiting:
                self._waiting.move_to_end(key)
            self._pass_on()

    async def _wait(self, key: str) -> None:
        waiting = self._waiting.setdefault(key, deque())
        if len(waiting) >= self._max_waiting:
            raise OverloadedError(
                f"{len(waiting)} {self._what} are waiting to be checked with this key, the most; try again later",
                RETRY_S,
            )
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(mine)
        self._pass_on()
        try:
            async with asyncio.timeout(self._longest_s):
                await mine
        except BaseException as error:
            self._give_up(key, mine)
            if isinstance(error, TimeoutError):
                raise OverloadedError(
                    f"too many {self._what} are waiting to be checked with this key; try again later", RETRY_S
                ) from None
            raise

    def _give_up(self, key: str, mine: "asyncio.Future[None]") -> None:
        if mine.done() and not mine.cancelled():  # the turn came at the same time
            self._running.discard(key)
            self._free += 1
        elif mine in self._waiting.get(key, ()):
            self._waiting[key].remove(mine)
        self._pass_on()

    def _pass_on(self) -> None:
        """Give free turns to the keys that have waited longest."""
        for key in list(self._waiting):
            waiting = self._waiting[key]
            while waiting and waiting[0].done():  # it gave up
                waiting.popleft()
            if not waiting:
                del self._waiting[key]
            elif self._free and key not in self._running:
                self._free -= 1
                self._running.add(key)
                waiting.popleft().set_result(None)
