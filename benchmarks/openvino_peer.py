"""Slipstream against OpenVINO GenAI: same weights, prompts and numbers of tokens, greedy, end of text ignored.

    python -m benchmarks.openvino_peer --peer-python .venv-openvino/bin/python [--limit 8] [--output figures.json]

OpenVINO GenAI needs an environment of its own, which `make openvino-peer` makes; without `--peer-python` nothing is
measured. It runs in a process of that environment, which first exports the checkpoints into a temporary folder. Its
dtype is the one that Slipstream computes in, also for keys and values. Neither side reuses prefixes.

Batch 1, each prompt is one block in which every side runs: without speculation (OpenVINO's default attention, which is
paged, and its stateful model), with the draft model, and with prompt lookup of n-grams of 1 to 3 tokens. Then all
concurrent requests at once. Ratios are of the time of all blocks, with bootstrap 95 % intervals over blocks; rounding
differs, so tokens may: the output says how many are equal up to the first difference of each answer.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine import Goal, report
from benchmarks.shared import measure, openvino_server, workload
from benchmarks.shared.json_process import JsonProcess
from benchmarks.shared.sides import DemoEngine
from benchmarks.shared.workload import Item
from demo import pair
from workers.model.loader import pick_dtype

LEFT_OUT = "OpenVINO GenAI is left out: `make openvino-peer` installs it where `make bench` finds it (--peer-python)"

OFF, DRAFT, NGRAM = "speculation off", "draft_model", "ngram"
PLAIN, STATEFUL = "OpenVINO", "OpenVINO, stateful"
PEER_DRAFT, PEER_LOOKUP = "OpenVINO, draft model", "OpenVINO, prompt lookup"
CONTINUOUS = "OpenVINO, continuous batching"
SERVED = {
    PLAIN: "plain",
    STATEFUL: "stateful",
    PEER_DRAFT: "draft_model",
    PEER_LOOKUP: "ngram",
    CONTINUOUS: "concurrent",
}
"""The names that the process knows the peer's sides by."""
SINGLE_GOALS = (
    Goal(OFF, PLAIN, 1.0),
    Goal(OFF, STATEFUL, 1.0),
    Goal(DRAFT, PEER_DRAFT, 1.0),
    Goal(NGRAM, PEER_LOOKUP, 1.0),
)
CONCURRENT_GOALS = (Goal(OFF, CONTINUOUS, 1.0),)

LOOKUP_TOKENS, LOOKUP_MAX = 5, 3
PEER_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}

Tokens = list[list[int]]


@dataclass
class RecordedSide:
    """A side of the comparison that keeps what it generated, in order."""

    run: Callable[[Sequence[Item]], Tokens]
    outputs: Tokens = field(default_factory=list)

    def __call__(self, items: Sequence[Item]) -> int:
        """Run all *items* at once; return the number of tokens."""
        made = self.run(items)
        self.outputs += made
        return sum(map(len, made))


Sides = Mapping[str, RecordedSide]


def equal_share(tokens: Tokens, reference: Tokens) -> float:
    """Return the share of *reference* that *tokens* equal, each answer up to its first difference."""
    same = sum(len(list(takewhile(bool, map(eq, one, other)))) for one, other in zip(tokens, reference, strict=True))
    return same / sum(map(len, reference))


class Peer(JsonProcess):
    """OpenVINO GenAI in its process.

    Args:
        python: of its environment.
        config: what `openvino_server` takes.
    """

    def __init__(self, python: Path, config: Mapping[str, Any]) -> None:
        super().__init__("OpenVINO", [str(python), "-I", openvino_server.__file__, json.dumps(config)], {})

    def tokens(self, side: str, items: Sequence[Item]) -> Tokens:
        """Return what one of its sides generates."""
        answer: Tokens = self.ask({"side": side, "requests": [[list(item.prompt), item.max_tokens] for item in items]})
        return answer


@contextmanager
def peer(args: argparse.Namespace, target: Path, draft: Path) -> Iterator[Peer]:
    """Yield the peer, started."""
    dtype, _ = pick_dtype("auto", {}, target, torch.device("cpu"))
    with tempfile.TemporaryDirectory(prefix="slipstream-openvino-") as folder:
        checkpoints = {"target": target, "draft": draft}
        config = {
            "models": {
                name: {"checkpoint": str(path.resolve()), "model": str(Path(folder) / name)}
                for name, path in checkpoints.items()
            },
            "threads": args.threads,
            "dtype": PEER_DTYPES[dtype],
            "num_draft_tokens": {"draft_model": args.num_speculative_tokens, "ngram": LOOKUP_TOKENS},
            "max_ngram_size": LOOKUP_MAX,
        }
        with closing(Peer(args.peer_python, config)) as process:
            process.await_start()
            yield process


def engines(args: argparse.Namespace, target: Path, draft: Path) -> dict[str, DemoEngine]:
    """Return Slipstream's sides."""
    configs: dict[str, dict[str, Any] | None] = {
        OFF: None,
        DRAFT: {"model": str(draft), "num_speculative_tokens": args.num_speculative_tokens},
        NGRAM: {
            "method": "ngram",
            "num_speculative_tokens": LOOKUP_TOKENS,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": LOOKUP_MAX,
        },
    }
    return {name: DemoEngine(target, config, threads=args.threads) for name, config in configs.items()}


def compared(
    title: str,
    runs: Mapping[str, Callable[[Sequence[Item]], Tokens]],
    blocks: Sequence[Sequence[Item]],
    goals: Sequence[Goal],
) -> dict[str, Any]:
    """Measure *runs* on *blocks*, print the figures, and return them."""
    for run in runs.values():
        run(blocks[0])  # warm
    sides = {name: RecordedSide(run) for name, run in runs.items()}
    figures = report(title, measure.alternate(sides, blocks), goals)
    figures["equal_tokens"] = equal = {
        name: equal_share(side.outputs, sides[OFF].outputs) for name, side in sides.items() if name != OFF
    }
    print(f"  equal to the tokens of {OFF!r}: " + ", ".join(f"{name} {share:.0%}" for name, share in equal.items()))
    return figures


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = measure.arguments(__doc__)
    parser.add_argument("--peer-python", type=Path, help="the Python of an environment with OpenVINO GenAI")
    parser.add_argument("--repeat", type=measure.COUNT, default=1, help="times that each batch-1 prompt is measured")
    parser.add_argument(
        "--rounds", type=measure.COUNT, default=8, help="times that the concurrent requests are measured"
    )
    args = parser.parse_args(given)
    if args.peer_python is not None and not args.peer_python.is_file():
        parser.error(f"--peer-python: there is no file {args.peer_python}")
    return args


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of both parts."""
    target, draft = args.model or pair()[0], args.draft or pair()[1]
    work = workload.load(target, args.limit)
    ours = {name: engine.tokens for name, engine in engines(args, target, draft).items()}
    with peer(args, target, draft) as process:
        theirs = {name: partial(process.tokens, served) for name, served in SERVED.items()}
        both: dict[str, Callable[[Sequence[Item]], Tokens]] = {**ours, **theirs}
        continuous = {name: both[name] for name in (OFF, CONTINUOUS)}
        single = {name: run for name, run in both.items() if name != CONTINUOUS}
        return {
            "single": compared("batch 1, greedy", single, [[item] for item in work.single * args.repeat], SINGLE_GOALS),
            "concurrent": compared(
                f"{len(work.concurrent)} concurrent, greedy",
                continuous,
                [work.concurrent] * args.rounds,
                CONCURRENT_GOALS,
            ),
        }


def main(given: Sequence[str] | None = None) -> None:
    args = arguments(given)
    if args.peer_python is None:
        print(LEFT_OUT)
        return
    torch.set_num_threads(args.threads)
    figures = {
        "environment": measure.environment(args.threads),
        "num_speculative_tokens": args.num_speculative_tokens,
        **measured(args),
    }
    measure.write(args.output, figures)


if __name__ == "__main__":
    main()
