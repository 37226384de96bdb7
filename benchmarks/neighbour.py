"""Decoding beside busy processes and within a CPU quota, relative to decoding alone.

    python -m benchmarks.neighbour [--rounds 4] [--output figures.json]

The demo pair at batch 1, without speculation and with the draft model. Each engine runs in a process of its own: with
Slipstream's settings, which choose the number of threads, and with a fixed number of threads and OpenMP's defaults. In
each round they decode the same prompts alone, beside one and beside two processes that compute without a pause, and,
with Slipstream's settings, within a quota of half a core; engines and situations take turns. Before its prompts an
engine decodes for a second, in which it chooses its number of threads as if it had been started there. A quota needs a
writable cgroup; where none can be made, the output says so.

A figure is the median over prompts of the ratio of times in the same round, with a bootstrap 95 % interval. Wanted: at
most 2.2 times the time alone beside one busy process for each core, 1.1 times that of OpenMP's defaults alone, and 2.2
times the time alone divided by the quota.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from benchmarks.shared import measure, workload
from benchmarks.shared.contention import QuotaGroup, busy_processes, others_seconds
from benchmarks.shared.engine_process import EngineProcess
from benchmarks.shared.workload import Item
from demo import pair
from workers.threads import usable_cores

OFF, DRAFT = "speculation off", "draft_model"
CHOSEN, FIXED = "threads chosen", "threads fixed"
OPENMP_DEFAULTS = {"GOMP_SPINCOUNT": "300000"}
"""What OpenMP uses if neither this nor OMP_WAIT_POLICY is set. Slipstream sets it unless it is set already."""
ALONE, QUOTA = "alone", "quota"
TOKENS = 64
NEIGHBOURS = (1, 2)
QUOTA_CORES = 0.5
BEGIN_S = 0.3
"""In which busy processes start."""
BESIDE_AT_MOST, ALONE_AT_MOST, QUOTA_AT_MOST = 2.2, 1.1, 2.2

Situation = Callable[[int], AbstractContextManager[list[int]]]
"""Enters a situation for the process with this id; yields the ids of its busy neighbours."""


def beside(count: int) -> str:
    return f"beside {count} busy"


@contextmanager
def with_busy(count: int, _: int) -> Iterator[list[int]]:
    with busy_processes(count) as pids:
        time.sleep(BEGIN_S)
        yield pids


@contextmanager
def situations() -> Iterator[tuple[dict[str, Situation], str]]:
    """Yield how to enter each situation by name, and why there is no quota, if there is none."""
    found: dict[str, Situation] = {ALONE: partial(with_busy, 0)}
    found |= {beside(count): partial(with_busy, count) for count in NEIGHBOURS}
    try:
        group = QuotaGroup(QUOTA_CORES)
    except OSError as error:
        yield found, f"no quota: a cgroup could not be made here: {error}"
        return
    try:
        yield {**found, QUOTA: group.around}, ""
    finally:
        group.close()


@dataclass
class NeighbourTimes:
    """Of each engine in each situation: seconds `[B]` and threads `[B]` by prompt and round, and other programs' cores.

    `others` has a number for each round: how many cores' worth of time programs took that are not part of it.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    threads: dict[str, list[int]] = field(default_factory=dict)
    others: dict[str, list[float]] = field(default_factory=dict)

    def decode(self, name: str, process: EngineProcess, situation: Situation, items: Sequence[Item], s: float) -> None:
        """Let *process* decode for *s* seconds, then *items*, in a situation, and add what was measured."""
        with situation(process.pid) as neighbours:
            known = [process.pid, *neighbours]
            began, before = time.monotonic(), others_seconds(known)
            seconds, threads = process.decode(items, s)
            taken = (others_seconds(known) - before) / (time.monotonic() - began)
        self.seconds.setdefault(name, []).extend(seconds)
        self.threads.setdefault(name, []).extend(threads)
        self.others.setdefault(name, []).append(taken)

    def timings(self) -> measure.Timings:
        """Return the same for comparisons."""
        seconds = {name: np.array(values) for name, values in self.seconds.items()}
        return measure.Timings(np.full(len(next(iter(seconds.values()))), float(TOKENS)), seconds)


def name_of(engine: tuple[str, str], situation: str) -> str:
    return ", ".join((*engine, situation))


def rotated(values: Sequence[Any], by: int) -> list[Any]:
    """Return *values* with a different one first for each of the first numbers."""
    return [*values[by % len(values) :], *values[: by % len(values)]]


def is_measured(engine: tuple[str, str], place: str) -> bool:
    """Whether an engine is measured in a situation. With fixed threads a round within the quota would take minutes."""
    return engine[1] == CHOSEN or place != QUOTA


def measured(
    engines: Mapping[tuple[str, str], EngineProcess],
    places: Mapping[str, Situation],
    items: Sequence[Item],
    args: argparse.Namespace,
) -> NeighbourTimes:
    """Run all rounds."""
    found = NeighbourTimes()
    for index in range(args.rounds):
        print(f"round {index + 1} of {args.rounds}", flush=True)
        some = rotated(items, index * args.prompts)[: args.prompts]
        for place in rotated(list(places), index):
            for engine in rotated(list(engines), index):
                if is_measured(engine, place):
                    found.decode(name_of(engine, place), engines[engine], places[place], some, args.settle)
    return found


@contextmanager
def engine_processes(args: argparse.Namespace) -> Iterator[dict[tuple[str, str], EngineProcess]]:
    """Yield the engines by kind of speculation and of settings; end them afterwards."""
    target, draft = args.model or pair()[0], args.draft or pair()[1]
    speculation = {OFF: None, DRAFT: {"model": str(draft), "num_speculative_tokens": args.num_speculative_tokens}}
    with ExitStack() as stack:
        engines = {}
        for kind, config in speculation.items():
            engines[kind, CHOSEN] = EngineProcess(target, config, None, {})
            stack.callback(engines[kind, CHOSEN].close)
            engines[kind, FIXED] = EngineProcess(target, config, args.threads, OPENMP_DEFAULTS)
            stack.callback(engines[kind, FIXED].close)
        for engine in engines.values():
            engine.await_start()
        yield engines


def goal(engine: tuple[str, str], place: str) -> float | None:
    """Return the largest wanted ratio to the time alone, if one is wanted."""
    if engine[1] == CHOSEN and place == beside(len(usable_cores())):
        return BESIDE_AT_MOST
    return QUOTA_AT_MOST / QUOTA_CORES if engine[1] == CHOSEN and place == QUOTA else None


def report(found: NeighbourTimes, engines: Sequence[tuple[str, str]], places: Sequence[str]) -> dict[str, Any]:
    """Print and return milliseconds per token and ratios."""
    timings = found.timings()
    taken = [cores for each in found.others.values() for cores in each]
    print(f"other programs took {np.median(taken):.2f} cores (median), {max(taken):.2f} at most")
    rows = []
    for engine in engines:
        for place in filter(partial(is_measured, engine), places):
            name = name_of(engine, place)
            ratio = timings.slowdown(name, name_of(engine, ALONE))
            ms = float(np.median(timings.seconds[name])) / TOKENS * 1e3
            wanted = goal(engine, place)
            counts = sorted(set(found.threads[name]))
            print(f"  {name:<50} {ms:6.2f} ms/token, {ratio!s:<22} threads {counts}" + shown(wanted))
            rows.append({"name": name, "ms_per_token": ms, "over_alone": asdict(ratio), "wanted_at_most": wanted})
    defaults = {}
    for kind in (OFF, DRAFT):
        both = timings.slowdown(name_of((kind, CHOSEN), ALONE), name_of((kind, FIXED), ALONE))
        print(f"  {kind}, alone, {CHOSEN} / {FIXED}: {both}" + shown(ALONE_AT_MOST))
        defaults[kind] = asdict(both)
    return {"rows": rows, "chosen_over_fixed_alone": defaults}


def shown(wanted: float | None) -> str:
    return "" if wanted is None else f"   wanted <= {wanted:.1f}"


def arguments() -> argparse.Namespace:
    parser = measure.arguments(__doc__)
    parser.add_argument("--rounds", type=measure.COUNT, default=4)
    parser.add_argument("--prompts", type=measure.COUNT, default=2, help="prompts of each engine, situation and round")
    parser.add_argument("--settle", type=float, default=1.0, help="seconds of decoding before the prompts")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    items = [Item(item.prompt, TOKENS) for item in workload.load(args.model or pair()[0], args.limit).single]
    with situations() as (places, why_no_quota), engine_processes(args) as engines:
        if why_no_quota:
            print(why_no_quota)
        found = measured(engines, places, items, args)
        figures = report(found, list(engines), list(places))
    measure.write(
        args.output,
        {
            "environment": measure.environment(args.threads),
            "cores": len(usable_cores()),
            "rounds": args.rounds,
            "prompts": args.prompts,
            "tokens": TOKENS,
            "why_no_quota": why_no_quota,
            **figures,
            "seconds": found.seconds,
            "threads_after": found.threads,
            "cores_of_other_programs": found.others,
        },
    )


if __name__ == "__main__":
    main()
