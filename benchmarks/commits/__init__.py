"""This checkout against an earlier commit: the host's time of a round with many rows, and the speed of the demo pair.

    python -m benchmarks.commits --before COMMIT [--blocks 12] [--output figures.json]

The earlier commit is checked out into a folder of its own. Both run in processes of their own, which alternate block
by block. The host's time is that outside model forwards: the work of the controller, the target and the draft around
them, of a median round. It is measured with a model of one small layer, which drafts for itself: all draft tokens are
accepted, and both commits run the same rounds. Models are compiled while the first run goes on: run it twice.

"on a GPU" is this checkout with its rounds as graphs, on a GPU that is pretended and takes no time: what is left of the
host's time where sampling, acceptance and the draft's loop are part of the graphs. The launches, the copy each way and
the wait are not in it. The earlier commit beside it is the one on CPUs: its work around the forwards was the same on
every device.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.commits import process
from benchmarks.shared import measure, workload
from benchmarks.shared.json_process import JsonProcess
from demo import pair

BEFORE, NOW, GRAPHS = "before", "now", "graphs"
ROWS, ROUNDS, PROMPT, VOCABULARY = 64, 40, 16, 512
K = 4
"""Draft tokens of each row with the small model."""
DEMO_TOKENS = 96
ALL_BATCH_SIZES = 1 << 20

Options = dict[str, Any]
Prompts = Sequence[Sequence[int]]


def small_model(folder: Path) -> Path:
    """Write a model that takes next to no time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def speculative(draft: Path, num_tokens: int) -> Options:
    """Return a configuration in which all rows have so many draft tokens, in words that earlier commits know."""
    table = [[1, ALL_BATCH_SIZES, num_tokens]]
    return {
        "model": str(draft),
        "num_speculative_tokens": num_tokens,
        "num_speculative_tokens_per_batch_size": table,
    }


def engines(small: Path, target: Path, draft: Path, threads: int, num_tokens: int) -> dict[str, Options]:
    """Return the options of each engine by its name, which begins with what is measured."""
    rows = {"model": str(small), "max_num_seqs": ROWS, "num_threads": 1}
    demo = {"model": str(target), "max_num_seqs": 1, "num_threads": threads}
    return {
        f"host, {ROWS} rows, plain": rows,
        f"host, {ROWS} rows, K = {K}": rows | {"speculative_config": speculative(small, K)},
        "demo, plain": demo,
        f"demo, K = {num_tokens}": demo | {"speculative_config": speculative(draft, num_tokens)},
    }


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """Check *commit* out into a folder, which is removed at the end."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkout"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(path), commit], check=True)
        try:
            yield path
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(path)], check=True)


class CommitProcess(JsonProcess):
    """The engines of one checkout."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        # -P: what lies beside the script is of this commit.
        command = [sys.executable, "-P", process.__file__, *arguments]
        super().__init__(str(folder), command, {"PYTHONPATH": str(folder)})
        if not Path(self.await_start()).is_relative_to(folder):
            raise RuntimeError(f"the engines are not those of {folder}")

    def generate(self, engine: str, tokens: int, prompts: Prompts) -> dict[str, float]:
        """Return the number of tokens, the seconds, and the host's of a median round."""
        answer: dict[str, float] = self.ask({"engine": engine, "tokens": tokens, "prompts": list(map(list, prompts))})
        return answer


def blocks_of(name: str, target: Path, number: int) -> tuple[int, list[Prompts]]:
    """Return the tokens of an answer, and the prompts of each block."""
    if name.startswith("demo"):
        items = workload.load(target, None).single
        return DEMO_TOKENS, [[items[block % len(items)].prompt] for block in range(number)]
    rng = torch.Generator().manual_seed(0)
    prompts = torch.randint(VOCABULARY, (number, ROWS, PROMPT), generator=rng).tolist()
    return ROUNDS * (1 if name.endswith("plain") else K + 1), prompts


def compared(name: str, sides: Mapping[str, CommitProcess], tokens: int, blocks: Sequence[Prompts]) -> dict[str, Any]:
    """Run all blocks on all sides, another one first each time; print a line, and return the figures.

    Raises:
        ValueError: the sides generated different numbers of tokens.
    """
    part, number = ("seconds", DEMO_TOKENS) if name.startswith("demo") else ("round", 1)
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for index, prompts in enumerate(blocks):
        order = list(sides)[:: 1 if index % 2 else -1]
        answers = {side: sides[side].generate(name, tokens, prompts) for side in order}
        if len({answer["tokens"] for answer in answers.values()}) != 1:
            raise ValueError(f"{name}: the commits generated different numbers of tokens: {answers}")
        for side, answer in answers.items():
            seconds[side] += [answer[part]] if index else []  # the first block warms up
    timings = measure.Timings(np.zeros(len(blocks) - 1), {side: np.array(each) for side, each in seconds.items()})
    each_ms = {side: 1e3 * float(np.median(values)) / number for side, values in timings.seconds.items()}
    ratios = {side: timings.slowdown(side, BEFORE) for side in sides if side != BEFORE}
    for side, ratio in ratios.items():
        title = name if side == NOW else f"{name}, on a GPU"
        print(f"| {title} | {each_ms[BEFORE]:.2f} | {each_ms[side]:.2f} | {ratio} |", flush=True)
    return {"ratio": {side: asdict(ratio) for side, ratio in ratios.items()}, "ms": each_ms}


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("--before", required=True, help="the earlier commit")
    parser.add_argument("--blocks", type=measure.COUNT, default=12)
    args = parser.parse_args()
    figures = run(args)
    measure.write(args.output, {"environment": measure.environment(args.threads), "before": args.before} | figures)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure everything, print a table, and return the figures by engine."""
    here = Path(__file__).resolve().parents[2]
    target, draft = args.model or pair()[0], args.draft or pair()[1]
    figures: dict[str, Any] = {}
    with ExitStack() as stack:
        small = small_model(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        options = engines(small, target, draft, args.threads, args.num_speculative_tokens)
        folders = {BEFORE: stack.enter_context(checkout(args.before)), NOW: here}
        sides = {side: CommitProcess(folder, json.dumps(options)) for side, folder in folders.items()}
        of_host = {name: each for name, each in options.items() if name.startswith("host")}
        graphs = CommitProcess(here, json.dumps(of_host), process.ON_GPU)
        for side in (*sides.values(), graphs):
            stack.callback(side.close)
        print("| engine | before, ms a round or token | now | now / before |\n|---|---|---|---|")
        for name in options:
            all_sides = sides | {GRAPHS: graphs} if name in of_host else sides
            figures[name] = compared(name, all_sides, *blocks_of(name, target, 1 + args.blocks))
    return figures
