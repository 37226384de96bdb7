"""The time of an empty round, controller to workers and back, over Slipstream's channel and over Ray actor calls.

    python -m benchmarks.round_latency [--blocks 40] [--processes] [--output figures.json]

Workers compute nothing: only the control plane is timed. Rounds in which the draft also sends draft tokens to target
rank 0 show the cost of sending them. With `--processes` workers are child processes, and Ray is left out. The sides
alternate block by block, a different one first each time; all actors run on this machine's Ray. The times are compared
with a step of the demo pair in one process.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks.shared import measure, workload
from benchmarks.shared.empty_worker import DRAFT, TIMEOUT_S, EmptyActor, is_first
from benchmarks.shared.sides import DemoEngine
from cluster.transport.process_workers import ProcessWorkerGroup
from demo import pair
from protos.messages import RoundPlan
from protos.worker_messages import (
    Died,
    DraftChannelReady,
    FormDraftChannel,
    Placed,
    Plan,
    RoundDone,
    Setup,
    StoreAddress,
    WorkerGroup,
    WorkerId,
)

CHANNEL, WITH_DRAFTS, RAY, RAY_FIRST = (
    "channel",
    "channel, with draft tokens",
    "ray actor calls",
    "ray, awaiting target 0 only",
)
AT_LEAST = 4.0
SHAPES = {"1 target + 1 draft": 1, "2 targets + 1 draft": 2}
ROUNDS = 100
"""Rounds of one side in one block."""
EPOCH = 1
LOGICAL_CPUS = 8
"""CPUs of a cluster that is started here: room for two replicas on any machine."""


class ChannelRounds:
    """Rounds over the channel. `waits` are the seconds target 0 waited for draft tokens, in rounds with drafts."""

    def __init__(self, group: WorkerGroup, num_targets: int, num_tokens: int) -> None:
        self._group = group
        self._workers = [*(WorkerId("target", rank) for rank in range(num_targets)), DRAFT]
        self._round = 0
        self.waits: list[float] = []
        group.start(self._workers)
        self._form(num_tokens)

    def _form(self, num_tokens: int) -> None:
        store: StoreAddress | None = None
        for worker, placed in self._receive(Placed, len(self._workers)):
            store = placed.store if is_first(worker) else store
        assert store is not None
        for worker in self._workers:
            self._group.send(worker, Setup(str(num_tokens), worker, len(self._workers) - 1, "cpu", "gloo"))
        for worker in (self._workers[0], DRAFT):
            self._group.send(worker, FormDraftChannel(EPOCH, store))
        self._receive(DraftChannelReady, 2)

    def _receive(self, kind: type, count: int) -> list[tuple[WorkerId, Any]]:
        found: list[tuple[WorkerId, Any]] = []
        deadline = time.monotonic() + TIMEOUT_S
        while len(found) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"received {len(found)} of {count} {kind.__name__}")
            for worker, message in self._group.receive(1.0):
                if isinstance(message, Died):
                    raise RuntimeError(f"{worker} died: {message.reason}")
                if isinstance(message, kind):
                    found.append((worker, message))
        return found

    def rounds(self, count: int, epoch: int = 0) -> int:
        """Run *count* rounds, one after another; return *count*."""
        for _ in range(count):
            self._round += 1
            plan = Plan(RoundPlan(self._round, (), epoch=epoch))
            for worker in self._workers:
                self._group.send(worker, plan)
            done = self._receive(RoundDone, 1)[0][1]
            if done.round != self._round:
                raise RuntimeError(f"round {self._round} was answered by {done.round}")
            if epoch:
                self.waits.append(done.wait_s)
        return count


class ActorRounds:
    """Rounds as actor calls: sent to all, and awaited from all, or from target 0 only."""

    def __init__(self, ray: Any, num_actors: int) -> None:
        self._get = ray.get
        self._actors = [ray.remote(EmptyActor).options(num_cpus=0).remote() for _ in range(num_actors)]
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(RoundDone)
        self._round = 0

    def rounds(self, count: int, awaited: int | None = None) -> int:
        """Run *count* rounds; return *count*."""
        for _ in range(count):
            self._round += 1
            plan = self._encoder.encode(RoundPlan(self._round, ()))
            answers = [actor.round.remote(plan) for actor in self._actors]
            if self._decoder.decode(self._get(answers[:awaited])[0]).round != self._round:
                raise RuntimeError(f"round {self._round} was answered by another")
        return count


@contextmanager
def cluster(num_cpus: int = LOGICAL_CPUS) -> Iterator[Any]:
    """Yield Ray, joined or started as by the engine, with workers that can import the benchmarks."""
    root = str(Path(__file__).resolve().parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    import ray  # noqa: PLC0415 - reads the environment when it is imported

    from cluster.ray.cluster import Membership  # noqa: PLC0415

    member = Membership(num_cpus)
    try:
        yield ray
    finally:
        member.leave()


def measured(ray: Any, num_targets: int, blocks: int, num_tokens: int) -> tuple[measure.Timings, list[float]]:
    """Return the times of all sides, and target 0's waiting times for draft tokens."""
    from cluster.ray.placement import BundleLayout, PlacementTimeout, place  # noqa: PLC0415
    from cluster.ray.workers import RayWorkerGroup  # noqa: PLC0415

    placement = place(BundleLayout(num_targets, True, {"CPU": 1.0}, "STRICT_PACK"), PlacementTimeout(TIMEOUT_S), print)
    group = RayWorkerGroup(placement, "benchmarks.shared.empty_worker:serve")
    try:
        channel, calls = ChannelRounds(group, num_targets, num_tokens), ActorRounds(ray, num_targets + 1)
        sides: dict[str, Callable[[int], int]] = {
            CHANNEL: channel.rounds,
            WITH_DRAFTS: lambda count: channel.rounds(count, EPOCH),
            RAY: calls.rounds,
            RAY_FIRST: lambda count: calls.rounds(count, 1),
        }
        return _timed(sides, channel, blocks), channel.waits
    finally:
        group.close()
        placement.remove()


def _timed(sides: dict[str, Callable[[int], int]], channel: ChannelRounds, blocks: int) -> measure.Timings:
    """Warm the sides up, then measure them in turns; the waits of *channel* are those of the latter."""
    for run in sides.values():
        run(ROUNDS)
    channel.waits.clear()
    return measure.alternate(sides, [ROUNDS] * blocks)


def measured_in_processes(num_targets: int, blocks: int, num_tokens: int) -> tuple[measure.Timings, list[float]]:
    """As `measured`, over child processes and without Ray."""
    group = ProcessWorkerGroup("benchmarks.shared.empty_worker:serve")
    try:
        channel = ChannelRounds(group, num_targets, num_tokens)
        sides: dict[str, Callable[[int], int]] = {
            CHANNEL: channel.rounds,
            WITH_DRAFTS: lambda count: channel.rounds(count, EPOCH),
        }
        return _timed(sides, channel, blocks), channel.waits
    finally:
        group.close()


def demo_steps(args: Any) -> measure.Floats:
    """Return the seconds of a step of the demo pair, one request at a time, averaged over each request."""
    target, draft = args.model or pair()[0], args.draft or pair()[1]
    speculative = {
        "model": str(draft),
        "num_speculative_tokens": args.num_speculative_tokens,
        "policy": "fixed",
    }
    engine = DemoEngine(target, speculative, threads=args.threads)
    items = workload.load(target, args.limit or 16).single
    engine.all(items[:1])  # warm
    found = []
    for item in items:
        began, before = time.perf_counter(), engine.llm.stats().steps
        engine.all((item,))
        found.append((time.perf_counter() - began) / (engine.llm.stats().steps - before))
    engine.llm.shutdown()
    return np.array(found)


def report(timings: measure.Timings, waits: list[float], steps: measure.Floats) -> dict[str, Any]:
    """Print and return the figures of one shape, in seconds a round."""
    each = {side: seconds / timings.tokens_B for side, seconds in timings.seconds.items()}
    faster = {side: timings.speedup(CHANNEL, side) for side in (RAY, RAY_FIRST) if side in each}
    shares = {side: measure.share(seconds, steps) for side, seconds in each.items()}
    for side, seconds in each.items():
        print(f"  {side:28} {np.median(seconds) * 1e6:8.0f} us, of a demo step {shares[side]}")
    print(f"  draft tokens: target 0 waits {np.median(waits) * 1e6:.0f} us")
    for side, ratio in faster.items():
        print(f"  {CHANNEL} is faster than {side} by {ratio}" + (f"   wanted >= {AT_LEAST}" if side == RAY else ""))
    return {
        "round_s": {side: seconds.tolist() for side, seconds in each.items()},
        "draft_wait_s": {"median": float(np.median(waits)), "p95": float(np.percentile(waits, 95))},
        "times_faster": {side: asdict(ratio) for side, ratio in faster.items()},
        "share_of_demo_step": {side: asdict(ratio) for side, ratio in shares.items()},
    }


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("--blocks", type=measure.COUNT, default=40)
    parser.add_argument("--processes", action="store_true", help="child processes instead of Ray actors")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    steps = demo_steps(args)
    print(f"a step of the demo pair, K={args.num_speculative_tokens}: {np.median(steps) * 1e6:.0f} us")
    shapes = {}
    with nullcontext() if args.processes else cluster() as ray:
        for name, num_targets in SHAPES.items():
            size = num_targets, args.blocks, args.num_speculative_tokens
            timings, waits = measured_in_processes(*size) if args.processes else measured(ray, *size)
            print(name)
            shapes[name] = report(timings, waits, steps)
    measure.write(
        args.output,
        {
            "environment": measure.environment(args.threads),
            "blocks": args.blocks,
            "rounds_per_block": ROUNDS,
            "demo_step_s": steps.tolist(),
            "shapes": shapes,
        },
    )


if __name__ == "__main__":
    main()
