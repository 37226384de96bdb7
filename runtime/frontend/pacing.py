"""How a stream is cut into packets: as steps end, or at fixed times and in fixed sizes.

Whoever sees only the encrypted packets of a stream can tell much of its text from their sizes and times, the more so
where one step brings several tokens at once: how many were guessed right depends on the text. `Aggregate` leaves them
the time that the whole answer took, and the size of what does not fit one packet in an interval.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence

from runtime.frontend.stream_queue import Delta

SHORTEST_COMMENT = len(b":\n\n")


class Pacing(ABC):
    """Groups what a stream yields, and makes packets of what is said about a group."""

    @abstractmethod
    def batches(self, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[list[Delta], None]:
        """Yield all *deltas*, group by group; a group may be empty. Does not close them."""

    @abstractmethod
    def packet(self, events: Sequence[bytes]) -> bytes:
        """Return server-sent *events* as they are to be written, in one piece; nothing where nothing is."""

    @abstractmethod
    def padding(self, num_bytes: int) -> int | None:
        """Return how many bytes are missing behind *num_bytes* to a whole packet; None where packets have no size."""


class Unpaced(Pacing):
    """Everything as it comes."""

    async def batches(self, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[list[Delta], None]:
        """See `Pacing`."""
        async for delta in deltas:
            yield [delta]

    def packet(self, events: Sequence[bytes]) -> bytes:
        """See `Pacing`."""
        return b"".join(events)

    def padding(self, num_bytes: int) -> int | None:
        """See `Pacing`."""
        del num_bytes  # as many as they are
        return None


class Aggregate(Pacing):
    """One packet an interval, whether there is something to tell or not, padded by a comment.

    Args:
        interval_s: from one packet to the next.
        packet_bytes: packets are this long, or a multiple of it.
    """

    def __init__(self, interval_s: float = 0.1, packet_bytes: int = 1024) -> None:
        self._interval_s = interval_s
        self._packet_bytes = packet_bytes

    async def batches(self, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[list[Delta], None]:
        """See `Pacing`."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        coming = asyncio.ensure_future(anext(deltas, None))
        try:
            while True:
                due = max(due + self._interval_s, loop.time())
                batch: list[Delta] = []
                while await _within(coming, due) and (delta := coming.result()) is not None:
                    batch.append(delta)
                    coming = asyncio.ensure_future(anext(deltas, None))
                await asyncio.sleep(due - loop.time())  # the last packet keeps the time, too
                yield batch
                if coming.done() and coming.result() is None:
                    return
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)

    def packet(self, events: Sequence[bytes]) -> bytes:
        """See `Pacing`."""
        said = b"".join(events)
        return said + b":" + b"." * self.padding(len(said) + SHORTEST_COMMENT) + b"\n\n"

    def padding(self, num_bytes: int) -> int:
        """See `Pacing`."""
        return -num_bytes % self._packet_bytes


async def _within(coming: "asyncio.Future[Delta | None]", due: float) -> bool:
    """Wait for *coming* until the loop's time is *due*; return whether it came."""
    await asyncio.wait((coming,), timeout=max(0.0, due - asyncio.get_running_loop().time()))
    return coming.done()


UNPACED = Unpaced()
