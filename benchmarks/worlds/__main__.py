"""The policy `adaptive` in simulated worlds, against no speculation and the best fixed number of draft tokens.

    python -m benchmarks.worlds [--quick] [--only "gpu, 8 rows;trees"] [--seed 0] [--jobs 2] [--output FILE]

In each world what rounds cost, which draft tokens are right, and how long the policy itself takes are made up. So the
figures are the same on each machine, and whatever else runs on it.
"""

import argparse
import json
import math
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from benchmarks.shared.measure import COUNT
from benchmarks.worlds.catalog import worlds
from benchmarks.worlds.world import World, WorldResult, compare

HEADER = """| World | adaptive / plain | adaptive / best fixed K | Best K | Switches | Probes | Rounds |
|---|---|---|---|---|---|---|"""
LEAST = 0.97
"""A world with less is counted as one in which something is lost."""
QUICK_EVERY = 4
"""`--quick` runs one world of so many."""


def summary(results: Sequence[WorldResult]) -> list[str]:
    """Return the lines below the table."""
    lines = []
    for what, side in (("over_plain", "plain decoding"), ("over_best", "the best fixed K")):
        values = {one.world: getattr(one, what) for one in results}
        mean = math.exp(sum(map(math.log, values.values())) / len(values))
        worst = min(values, key=values.__getitem__)
        below = sum(value < LEAST for value in values.values())
        least = f"worst {values[worst]:.3f} ({worst}), {below} of {len(values)} below {LEAST}"
        lines.append(f"against {side}: geometric mean {mean:.4f}, {least}")
    return lines


def chosen(only: str | None, *, is_quick: bool) -> list[World]:
    """Return the worlds whose name has one of the parts in *only*, separated by ";". Raises ValueError if none has."""
    parts = only.split(";") if only else [""]
    found = [world for world in worlds() if any(part in world.name for part in parts)]
    if not found:
        raise ValueError(f"no world's name has a part of {only!r}")
    return found[::QUICK_EVERY] if is_quick else found


def compare_named(name: str, seed: int) -> WorldResult:
    """Compare in the world of this name: a process is sent no functions."""
    return compare(next(world for world in worlds() if world.name == name), seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help='parts of the names of worlds, separated by ";"')
    parser.add_argument("--quick", action="store_true", help=f"one world of {QUICK_EVERY}")
    parser.add_argument("--seed", type=int, default=0, help="of text and noise")
    parser.add_argument("--jobs", type=COUNT, default=2, help="processes")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    args = parser.parse_args()
    try:
        names = [world.name for world in chosen(args.only, is_quick=args.quick)]
    except ValueError as error:
        parser.error(str(error))
    results = []
    print(HEADER, flush=True)
    with ProcessPoolExecutor(args.jobs) as pool:
        for result in pool.map(partial(compare_named, seed=args.seed), names):
            results.append(result)
            print(result, flush=True)
    print("\n".join(summary(results)))
    if args.output:
        args.output.write_text(json.dumps([one.as_json() for one in results], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
