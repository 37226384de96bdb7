"""Delivers the reports of a controller in another process, from the socket that they arrive on."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
import zmq.asyncio

from runtime.frontend.channel import Report
from runtime.frontend.silence import SILENCE_LIMITS, SilenceWatch

LAST_REPORTS_MS = 50
"""Reports of a controller that has ended arrive within this time."""

Ended = TypeVar("Ended")


async def deliver(
    socket: zmq.asyncio.Socket,
    ended: Awaitable[Ended],
    on_report: Callable[[Report], None],
    kill: Callable[[], None],
) -> Ended:
    """Pass on reports until the controller has *ended*, then those that are in flight.

    Args:
        socket: the reports arrive on it.
        ended: returns once the controller's process is gone.
        on_report: called with each report, and with `Stalled` when they cease (`SilenceWatch`).
        kill: ends the controller's process.

    Returns:
        The result of *ended*.
    """
    decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
    silence = SilenceWatch(on_report, kill, SILENCE_LIMITS)

    async def receive() -> None:
        while True:
            silence.take(decoder.decode(await socket.recv()))
            await asyncio.sleep(0)  # `recv` does not suspend while messages are queued; let readers of streams run

    tasks = [asyncio.create_task(receive()), asyncio.create_task(silence.run())]
    try:
        result = await ended
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    while await socket.poll(timeout=LAST_REPORTS_MS):
        silence.take(decoder.decode(await socket.recv()))
    return result
