"""How long streams are silent when a worker is killed or stopped, and whether an answer fails or differs.

    python -m benchmarks.recovery [--repeats 3] [--role ROLE] [--output figures.json]

Clients stream requests without a pause from the demo pair on Ray: two target ranks and a draft. Each role is killed
(SIGKILL) and stopped (SIGSTOP) in turn. The silence is the longest time without a token of any stream around the fault.
Wanted: at most 5 s after a kill, 8 s after a stop, and no answer that fails or differs from that of one process without
speculation.
"""

import argparse
import asyncio
import itertools
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.shared import measure
from benchmarks.shared.faults import STEADY_STEPS, Actors, role
from benchmarks.soak import SoakLoad, SoakRequest, disturbed_config, wanted_requests
from cluster import assemble
from cluster.ray.channel import RayChannel
from protos.config.engine import EngineConfig
from protos.messages import WorkerInfo
from runtime.frontend.async_engine import AsyncEngine
from runtime.text.preprocessor import Preprocessor

ROLES = ("target rank 0", "target rank 1", "draft")
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
LIMIT_S = {signal.SIGKILL: 5.0, signal.SIGSTOP: 8.0}
PATIENCE_S = 60.0
POLL_S = 0.05


class Disturber:
    """Injects one fault after another into the workers of *engine*, and measures the silence after each."""

    def __init__(self, engine: AsyncEngine, actors: Actors, settle_s: float) -> None:
        self._engine, self._actors, self._settle_s = engine, actors, settle_s
        self._arrivals = [time.monotonic()]

    def on_tokens(self) -> None:
        """Record that tokens have arrived."""
        self._arrivals.append(time.monotonic())

    async def silence(self, who: str, number: signal.Signals) -> float:
        """Send the signal to the worker *who*; return the longest time without a token until it is replaced."""
        await asyncio.sleep(self._settle_s)
        alive = await asyncio.to_thread(self._actors.refresh)
        (pid,) = (pid for name, pid in alive.items() if role(name) == who)
        began, steps = time.monotonic(), self._engine.stats().steps
        os.kill(pid, number)
        while not await self._is_replaced(who, pid, steps):
            if time.monotonic() - began > PATIENCE_S:
                break
            await asyncio.sleep(POLL_S)
        return self._longest(began)

    async def _is_replaced(self, who: str, pid: int, steps: int) -> bool:
        """Whether another process has the role, and the group has run some rounds since."""
        alive = await asyncio.to_thread(self._actors.refresh)
        is_new = any(role(name) == who and new != pid for name, new in alive.items())
        stats = self._engine.stats()
        return is_new and stats.steps >= steps + STEADY_STEPS and not (stats.target_is_lost or stats.draft_is_down)

    def _longest(self, since: float) -> float:
        """Return the longest time without a token from *since* until now."""
        times = [since, *(at for at in self._arrivals if at > since), time.monotonic()]
        return max(after - before for before, after in itertools.pairwise(times))


async def disturb(config: EngineConfig, requests: Sequence[SoakRequest], args: argparse.Namespace) -> dict[str, Any]:
    """Serve the load, inject every fault *repeats* times, and return the figures."""
    channel = RayChannel(config)

    async def make_preprocessor(info: WorkerInfo) -> Preprocessor:
        return assemble.make_preprocessor(config, info, None)

    engine = AsyncEngine(channel, make_preprocessor)
    silences: dict[str, list[float]] = {}
    try:
        await engine.start(lambda line: print(f"  {line}"))
        assert channel.placement is not None
        disturber = Disturber(engine, Actors(channel.placement), args.settle)
        load = SoakLoad(engine, requests, seed=0, on_tokens=disturber.on_tokens)
        serving = asyncio.create_task(load.run(float("inf")))
        for who, number, _ in itertools.product(args.role or ROLES, SIGNALS, range(args.repeats)):
            silence = await disturber.silence(who, number)
            silences.setdefault(f"{who}, {number.name}", []).append(silence)
            print(f"{who}, {number.name}: {silence:.2f} s", flush=True)
        load.stop()
        await serving
    finally:
        await engine.close()
    return {"silence_s": silences, "requests": dict(load.score.counts), "notes": load.score.notes}


def shown(found: dict[str, Any]) -> bool:
    """Print the figures; return whether no answer failed or differs, and every silence is within its limit."""
    print(f"requests: {found['requests']}")
    for note in found["notes"]:
        print(f"  {note}")
    limits = {number.name: limit for number, limit in LIMIT_S.items()}
    is_in_time = True
    for fault, seconds in found["silence_s"].items():
        print(f"| {fault} | {', '.join(f'{each:.1f}' for each in seconds)} |")
        is_in_time &= max(seconds) <= limits[fault.rpartition(", ")[2]]
    return is_in_time and not (found["requests"].get("failed") or found["requests"].get("different"))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = measure.arguments(__doc__)
    made.add_argument("--repeats", type=measure.COUNT, default=3)
    made.add_argument("--role", action="append", choices=ROLES, help="only this role; may be repeated")
    made.add_argument("--settle", type=float, default=6.0, help="seconds of undisturbed streams before each fault")
    made.add_argument("--tensor-parallel-size", type=measure.COUNT, default=2)
    made.set_defaults(threads=1)
    return made


def main() -> None:
    args = parser().parse_args()
    found = asyncio.run(disturb(disturbed_config(args), wanted_requests(args), args))
    has_passed = shown(found)
    measure.write(args.output, {"environment": measure.environment(args.threads), **found})
    sys.exit(not has_passed)


if __name__ == "__main__":
    main()
