"""A fleet of 1 to 1,000 simulated replicas, by router, with losses and rolling updates.

    python -m benchmarks.fleet [--replicas 1 10 100 1000] [--costs FILE] [--seed 0]
    python -m benchmarks.fleet --measure FILE    # writes the costs of this machine
    python -m benchmarks.fleet --check --costs FILE      # two real replicas and their simulation

Replicas batch continuously, with the costs of steps that an engine measured (`costs.json`: the demo pair on one core).
The router by prefix is that of Ray Serve's proxies. The simulation has no network and no preemption. `--check` sends
the same requests to two servers with one thread each, by the same routers.
"""

import argparse
import asyncio
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.fleet import costs
from benchmarks.fleet.measured import measured_costs
from benchmarks.fleet.real import drive, prompts_of, servers
from benchmarks.fleet.replica import ReplicaLimits
from benchmarks.fleet.routers import ROUTERS, make_router
from benchmarks.fleet.simulation import UNDISTURBED, Disturbance, FleetResult, FleetSimulation
from benchmarks.fleet.trace import Load
from benchmarks.shared.measure import COUNT

COSTS = Path(__file__).with_name("costs.json")
MEASURED = ReplicaLimits(max_seqs=8, max_tokens=128, kv_tokens=16_384, k=4)
SECONDS = 40
"""Requests arrive for about so long."""
SESSIONS = 4
HEADER = f"{'':34}  tokens/s   first token p50, p99 ms   prefix hits   sent again"


def load_of(num_replicas: int, rate: float, seed: int) -> Load:
    """Return a load of *rate* requests a second for each replica, of so many sessions for each."""
    return Load(rate * num_replicas, int(rate * SECONDS * num_replicas), SESSIONS * num_replicas, seed=seed)


def line(name: str, result: FleetResult) -> str:
    """Return one line of the table."""
    waits = f"{1000 * result.wait_s(50):10.0f} {1000 * result.wait_s(99):12.0f}"
    return f"{name:34} {result.tokens_per_s:9.0f}  {waits} {100 * result.hit_share:14.0f} % {result.retried:10}"


def table(args: argparse.Namespace) -> list[str]:
    """Return the lines of the table."""
    measured, lines = costs.read(args.costs), [HEADER]
    disturbances = {
        "": UNDISTURBED,
        ", a tenth lost": Disturbance(loss_at=SECONDS / 3, restart_s=10.0),
        ", rolling update": Disturbance(update_at=SECONDS / 4, restart_s=2.0),
    }
    for number in args.replicas:
        for k in (0, MEASURED.k):
            for router in ROUTERS:
                for what, disturbance in disturbances.items():
                    if what and (router != ROUTERS[0] or k == 0):
                        continue
                    limits, proxies = replace(MEASURED, k=k), max(1, min(16, number // 4))
                    fleet = FleetSimulation(
                        number,
                        make_router(router, args.seed, proxies),
                        measured,
                        limits,
                        disturbance=disturbance,
                        seed=args.seed,
                    )
                    result = fleet.run(load_of(number, args.rate, args.seed).make())
                    lines.append(line(f"{number:5} K={k} {router}{what}", result))
    return lines


def check(args: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of a table of two real replicas, each below that of their simulation."""
    measured = costs.read(args.costs)
    yield HEADER
    for k in (0, MEASURED.k):
        limits = replace(MEASURED, k=k)
        for router in ROUTERS:
            load = load_of(2, args.rate, args.seed)
            simulated = FleetSimulation(2, make_router(router, args.seed, 1), measured, limits, seed=args.seed)
            yield line(f"simulated K={k} {router}", simulated.run(load.make()))
            requests = load.make()
            prompts = prompts_of(requests, load.prefix)
            with servers(2, limits) as urls:
                real = asyncio.run(drive(urls, make_router(router, args.seed, 1), requests, prompts))
            yield line(f"real      K={k} {router}", real)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=COUNT, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--rate", type=float, default=0.5, help="requests a second for each replica")
    parser.add_argument("--costs", type=Path, default=COSTS)
    parser.add_argument("--measure", type=Path, help="write the costs of this machine's steps to this file")
    parser.add_argument("--check", action="store_true", help="compare the simulation with two real replicas")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.measure:
        measured_costs(MEASURED.k, MEASURED.max_seqs).write(args.measure)
    elif args.check:
        for text in check(args):
            print(text, flush=True)
    else:
        sys.stdout.write("\n".join(table(args)) + "\n")


if __name__ == "__main__":
    main()
