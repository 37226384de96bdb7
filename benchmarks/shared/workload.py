"""The fixed workload of every benchmark, read from `benchmarks/workload.json`."""

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

PATH = Path(__file__).parents[1] / "workload.json"
SHORTEST = 0.5
"""Of the average length, where answers differ in length; the longest are as much longer."""


@dataclass(frozen=True)
class SamplingSettings:
    """How tokens are chosen; temperature 0 is greedy."""

    temperature: float
    top_p: float = 1.0


@dataclass(frozen=True)
class Item:
    """One request: prompt ids and the number of tokens to generate, end of text or not.

    `sampling`: its own; None: that of all requests.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingSettings | None = None

    def varied(self, rng: random.Random) -> "Item":
        """Return the same with another number of tokens, which on average is this one."""
        return replace(self, max_tokens=round(rng.uniform(SHORTEST, 2 - SHORTEST) * self.max_tokens))


@dataclass(frozen=True)
class Workload:
    """Prompts that run alone, requests that run concurrently, and functions to repeat."""

    single: tuple[Item, ...]
    concurrent: tuple[Item, ...]
    editing: tuple[Item, ...]
    sampling: dict[str, SamplingSettings]


def load(model: Path, limit: int | None = None) -> Workload:
    """Return the workload in the ids of the tokenizer in *model*; at most *limit* requests of each kind."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    stored = json.loads(PATH.read_text(encoding="utf-8"))

    def items(rows: list[dict[str, Any]]) -> tuple[Item, ...]:
        encoded = tokenizer.encode_batch([row["prompt"] for row in rows[:limit]], add_special_tokens=False)
        return tuple(Item(tuple(e.ids), row["output_tokens"]) for e, row in zip(encoded, rows, strict=False))

    sampling = {name: SamplingSettings(**values) for name, values in stored["sampling"].items()}
    return Workload(items(stored["single"]), items(stored["concurrent"]), items(stored["editing"]), sampling)
