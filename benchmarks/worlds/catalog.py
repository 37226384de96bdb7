"""The worlds of the table."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from benchmarks.worlds.costs import EngineCosts, Noise, cpu, gpu, slow_cpu
from benchmarks.worlds.world import World, WorldPhase

ROUNDS = {1: 3000, 8: 2000, 32: 1400, 64: 1200, 200: 600}
"""Rounds of a world by its rows, without speculation."""
LEARNING_ROUNDS = 300
"""First rounds that do not count, except in worlds about them."""
PREDICTABLE, HALF, THIRD, NEVER = (0.8,), (0.5,), (0.35,), (0.0,)
TEXTS: Mapping[str, Sequence[float]] = {
    "predictable": PREDICTABLE,
    "half right": HALF,
    "a third right": THIRD,
    "never right": NEVER,
    "mixed": (0.85, 0.1),
}
MACHINES = {
    "gpu": gpu(),
    "gpu, draft apart": gpu(is_dedicated=True),
    "gpu with host": gpu(host_s=0.0015),
    "cpu": cpu(),
    "slow cpu": slow_cpu(),
}
BATCHES = {
    "gpu": [1, 8, 32, 64, 200],
    "gpu, draft apart": [1, 64],
    "gpu with host": [1, 8, 64],
    "cpu": [1, 8, 32, 64, 200],
    "slow cpu": [1, 8],
}


def steady(name: str, costs: EngineCosts, num_rows: int, rates: Sequence[float]) -> World:
    """Return a world in which nothing changes."""
    first = WorldPhase(num_rows, rates, LEARNING_ROUNDS, is_counted=False)
    return World(name, costs, (first, WorldPhase(num_rows, rates, ROUNDS[num_rows])))


def steady_worlds() -> Iterator[World]:
    """Yield all machines with all texts, at several sizes of batches."""
    for machine, costs in MACHINES.items():
        for num_rows in BATCHES[machine]:
            for text, rates in TEXTS.items():
                if len(rates) <= num_rows <= 64 or text in {"half right", "never right"}:
                    yield steady(f"{machine}, {num_rows} rows, {text}", costs, num_rows, rates)


def changing_worlds() -> Iterator[World]:
    """Yield worlds in which the text, the load or the machine's speed changes, or whose first rounds count."""
    for machine, costs in (("gpu", gpu()), ("cpu", cpu())):
        for num_rows in (1, 8, 64):
            texts = [WorldPhase(num_rows, rates, ROUNDS[num_rows]) for rates in (PREDICTABLE, NEVER, PREDICTABLE)]
            yield World(f"{machine}, {num_rows} rows, text changes", costs, texts)
        for text in ("predictable", "half right"):
            loads = [
                WorldPhase(num_rows, TEXTS[text], rounds) for num_rows, rounds in ((1, 1500), (64, 500), (1, 1500))
            ]
            yield World(f"{machine}, 1, 64, 1 rows, {text}", costs, loads)
            speeds = [WorldPhase(8, TEXTS[text], 1000, slowness) for slowness in (1.0, 1.6, 1.0)]
            yield World(f"{machine}, 8 rows, {text}, throttled", costs, speeds)
        yield World(f"{machine}, 8 rows, never right, from the start", costs, (WorldPhase(8, NEVER, 2000),))
        wrong, right = WorldPhase(1, NEVER, 3000, is_counted=False), WorldPhase(32, PREDICTABLE, 4000)
        yield World(f"{machine}, 32 rows, predictable after 1 row never right", costs, (wrong, right))


def disturbed_worlds() -> Iterator[World]:
    """Yield worlds with noise, and with wrong measures of warm-up, whose first rounds count."""
    noises = {"noise 10 %": Noise(0.1), "noise 30 %": Noise(0.3), "outliers": Noise(0.1, 0.01)}
    for machine, costs, num_rows in (("gpu", gpu(), 8), ("cpu", cpu(), 1), ("slow cpu", slow_cpu(), 8)):
        for text in ("half right", "never right"):
            name = f"{machine}, {num_rows} rows, {text}"
            world = steady(name, costs, num_rows, TEXTS[text])
            for what, noise in noises.items():
                yield replace(world, name=f"{name}, {what}", noise=noise)
            for target, draft in ((2.0, 1.0), (0.5, 1.0), (1.0, 2.0), (1.0, 0.5)):
                wrong = f"{name}, measured: target x {target:g}, draft x {draft:g}"
                yield World(
                    wrong, costs, (WorldPhase(num_rows, TEXTS[text], 2000),), Noise(0.05), 32, 256, target, draft
                )


def special_worlds() -> Iterator[World]:
    """Yield worlds with long contexts, knees between measured sizes, many prompts, and trees."""
    for machine, costs in (("gpu", gpu()), ("gpu, draft apart", gpu(is_dedicated=True))):
        for num_rows, prompt in ((8, 16_384), (64, 8192)):
            long = steady(f"{machine}, {num_rows} rows, half right, long contexts", costs, num_rows, HALF)
            yield replace(long, prompt=prompt, answer=512)
            back = (WorldPhase(num_rows, NEVER, 600, is_counted=False), WorldPhase(num_rows, PREDICTABLE, 1200))
            name = f"{machine}, {num_rows} rows, predictable again, long contexts"
            yield World(name, costs, back, prompt=prompt, answer=512)
    for knee in (150, 192, 256):
        for num_rows in (32, 64):
            yield steady(f"gpu, {num_rows} rows, predictable, knee {knee}", gpu(knee), num_rows, PREDICTABLE)
    for machine, costs in (("gpu", gpu()), ("cpu", cpu())):
        for num_rows in (8, 32):
            for text in ("predictable", "half right"):
                short = steady(f"{machine}, {num_rows} rows, {text}, many prompts", costs, num_rows, TEXTS[text])
                yield replace(short, prompt=256, answer=32)
        for num_rows in (1, 8):
            for text in ("predictable", "half right"):
                trees = steady(f"{machine}, {num_rows} rows, {text}, trees", costs, num_rows, TEXTS[text])
                yield replace(trees, has_trees=True)


def worlds() -> list[World]:
    """Return all worlds."""
    return [*steady_worlds(), *changing_worlds(), *disturbed_worlds(), *special_worlds()]
