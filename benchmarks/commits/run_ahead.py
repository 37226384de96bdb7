"""How long a GPU waits for the host between plain rounds, with `async_scheduling` and without.

    python -m benchmarks.commits.run_ahead [--rows 64] [--graph-ms 5] [--blocks 12] [--output figures.json]

The GPU is pretended: each of its graphs takes as long as it is told, one after another, and copies take no time. The
host's work is real: that of the controller and the target's rounds, with a model of one small layer. So the figures say
what is hidden of the host's work, not how fast a GPU is.
"""

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.commits import PROMPT, ROWS, VOCABULARY, small_model
from benchmarks.commits.process import PacedDevice, generate, on_gpu
from benchmarks.shared import measure
from slipstream import LLM

ROUNDS = 48
AHEAD, NOT_AHEAD = "ahead", "after its plan"
Prompts = Sequence[Sequence[int]]


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("--rows", type=measure.COUNT, default=ROWS, help=f"requests at once, at most {ROWS}")
    parser.add_argument("--graph-ms", type=float, default=5.0, help="milliseconds that a graph takes")
    parser.add_argument("--blocks", type=measure.COUNT, default=12)
    args = parser.parse_args()
    figures = run(args)
    measure.write(args.output, {"environment": measure.environment(args.threads)} | figures)


def run(args: argparse.Namespace) -> dict[str, object]:
    """Measure both, print a table, and return the figures."""
    with tempfile.TemporaryDirectory() as folder, on_gpu() as options:
        options |= {"enable_prefix_caching": False, "skip_tokenizer_init": True, "disable_log_stats": True}
        model = str(small_model(Path(folder)))
        limits = {"max_num_seqs": ROWS, "num_threads": 1, "max_model_len": 2 * (PROMPT + ROUNDS)}
        engines = {side: LLM(model, async_scheduling=side == AHEAD, **limits, **options) for side in (AHEAD, NOT_AHEAD)}
        times = timed(engines, blocks_of(args.rows, 1 + args.blocks), args.graph_ms / 1000)
    each_ms = {side: 1000 * float(np.median(seconds)) for side, seconds in times.seconds.items()}
    ratio = times.slowdown(AHEAD, NOT_AHEAD)
    print(f"| rows | a graph, ms | a round {NOT_AHEAD}, ms | begun {AHEAD}, ms | ratio |\n|---|---|---|---|---|")
    print(f"| {args.rows} | {args.graph_ms:g} | {each_ms[NOT_AHEAD]:.2f} | {each_ms[AHEAD]:.2f} | {ratio} |")
    return {"ms": each_ms, "ratio": str(ratio)}


def blocks_of(num_rows: int, number: int) -> list[Prompts]:
    """Return the prompts of each block."""
    dice = torch.Generator().manual_seed(0)
    prompts: list[Prompts] = torch.randint(VOCABULARY, (number, num_rows, PROMPT), generator=dice).tolist()
    return prompts


def timed(engines: Mapping[str, LLM], blocks: Sequence[Prompts], graph_s: float) -> measure.Timings:
    """Return the seconds of the median round of each block but the first, which warms up."""
    seconds: dict[str, list[float]] = {side: [] for side in engines}
    for index, prompts in enumerate(blocks):
        for side in list(engines)[:: 1 if index % 2 else -1]:
            command = {"prompts": prompts, "tokens": ROUNDS}
            round_s = generate(engines[side], command, PacedDevice(graph_s))["round"]
            seconds[side] += [round_s] if index else []
    return measure.Timings(np.zeros(len(blocks) - 1), {side: np.array(each) for side, each in seconds.items()})


if __name__ == "__main__":
    main()
