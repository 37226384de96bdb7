"""How a stream is divided into packets: at the end of each step, or at fixed times and in fixed sizes.

Sizes and times of encrypted packets reveal much of a text, the more so with speculative decoding: the number of
accepted tokens per step depends on the text. `Aggregate` reveals only the duration of the answer, and the size of what
exceeds one packet per interval.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence

from runtime.frontend.stream_queue import Delta, Deltas

SHORTEST_COMMENT = len(b":\n\n")


class Pacing(ABC):
    """Groups the deltas of a stream, and makes a packet of the events of each group."""

    @abstractmethod
    def batches(self, deltas: Deltas) -> AsyncGenerator[list[Delta], None]:
        """Yield all *deltas*, group by group; a group may be empty. Raises what they raise. Does not close them."""

    @abstractmethod
    def packet(self, events: Sequence[bytes]) -> bytes:
        """Return server-sent *events* as one packet; empty if there is nothing to send."""

    @abstractmethod
    def padding(self, num_bytes: int) -> int | None:
        """Return how many bytes to add to *num_bytes* for a whole packet; None if packets have no fixed size."""


class Unpaced(Pacing):
    """Sends each delta when it arrives."""

    async def batches(self, deltas: Deltas) -> AsyncGenerator[list[Delta], None]:
        """See `Pacing`."""
        async for delta in deltas:
            yield [delta]

    def packet(self, events: Sequence[bytes]) -> bytes:
        """See `Pacing`."""
        return b"".join(events)

    def padding(self, num_bytes: int) -> int | None:
        """See `Pacing`."""
        del num_bytes
        return None


class Aggregate(Pacing):
    """Sends one packet per interval, even if it is empty, padded by a comment.

    Args:
        interval_s: seconds from one packet to the next.
        packet_bytes: the size of packets is a multiple of this.
    """

    def __init__(self, interval_s: float = 0.1, packet_bytes: int = 1024) -> None:
        self._interval_s = interval_s
        self._packet_bytes = packet_bytes

    async def batches(self, deltas: Deltas) -> AsyncGenerator[list[Delta], None]:
        """See `Pacing`."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        pending = asyncio.ensure_future(anext(deltas, None))
        try:
            while True:
                due = max(due + self._interval_s, loop.time())
                batch: list[Delta] = []
                while await _done_by(pending, due) and not pending.exception() and (delta := pending.result()):
                    batch.append(delta)
                    pending = asyncio.ensure_future(anext(deltas, None))
                await asyncio.sleep(due - loop.time())  # the last packet is sent at its time, too
                yield batch
                if pending.done() and pending.result() is None:
                    return
        finally:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)

    def packet(self, events: Sequence[bytes]) -> bytes:
        """See `Pacing`."""
        data = b"".join(events)
        return data + b":" + b"." * self.padding(len(data) + SHORTEST_COMMENT) + b"\n\n"

    def padding(self, num_bytes: int) -> int:
        """See `Pacing`."""
        return -num_bytes % self._packet_bytes


async def _done_by(pending: "asyncio.Future[Delta | None]", due: float) -> bool:
    """Wait for *pending* until the loop's time is *due*; return whether it is done."""
    await asyncio.wait((pending,), timeout=max(0.0, due - asyncio.get_running_loop().time()))
    return pending.done()


UNPACED = Unpaced()
