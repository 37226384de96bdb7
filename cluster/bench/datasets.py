"""What `slipstream bench serve` asks for: made-up text, ShareGPT conversations, JSON lines, or our own workload."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from protos.errors import ConfigError
from protos.validation import shown

RANDOM, SHAREGPT, CUSTOM, WORKLOAD = "random", "sharegpt", "custom", "workload"
NAMES = (RANDOM, SHAREGPT, CUSTOM, WORKLOAD)
SUFFIXES = {".json": SHAREGPT, ".jsonl": CUSTOM}
CHARS_A_TOKEN = 4
"""Answers of a data set are told in text; so many characters count as a token where no length is given."""
ONSETS = ("b", "c", "d", "f", "g", "l", "m", "n", "p", "r", "s", "t", "v", "w", "st", "tr", "pl")
RIMES = ("a", "e", "i", "o", "u", "an", "en", "in", "on", "ar", "er", "or", "al", "el", "ing")


@dataclass(frozen=True)
class BenchPrompt:
    """One request: text, or the messages of a conversation, and the most tokens its answer may have."""

    content: str | list[dict[str, str]]
    max_tokens: int


@dataclass(frozen=True)
class DatasetOptions:
    """Which requests are wanted. `output_len` overrides what a data set says of answers.

    `input_len` counts words of made-up text, each of which most tokenizers make one or two tokens of.
    """

    dataset: str = RANDOM
    path: Path | None = None
    num_prompts: int = 100
    input_len: int = 256
    output_len: int | None = None
    seed: int = 0


def resolve(dataset: str, path: Path | None) -> tuple[str, Path | None]:
    """Return the kind and the file of a data set that was given as a name, or as a file whose suffix tells the kind.

    Raises:
        ConfigError: there is no such kind, or its file is missing.
    """
    kind = dataset
    if dataset not in NAMES:
        kind, path = SUFFIXES.get(Path(dataset).suffix, ""), Path(dataset)
    if not kind:
        raise ConfigError(
            f"dataset must be one of {', '.join(NAMES)}, or a .json (ShareGPT) or .jsonl file, got {shown(dataset)}"
        )
    if kind in (SHAREGPT, CUSTOM) and (path is None or not path.is_file()):
        raise ConfigError(f"dataset {kind} needs a file: --dataset-path, got {path or 'none'}")
    return kind, path


def load(wanted: DatasetOptions) -> list[BenchPrompt]:
    """Return as many prompts as are wanted, those of a data set again and again where it has fewer.

    Raises:
        ConfigError: the file is not what it should be, or nothing in it can be used.
    """
    kind, path = resolve(wanted.dataset, wanted.path)
    rng = random.Random(wanted.seed)
    if kind == RANDOM:
        return [_made_up(rng, wanted) for _ in range(wanted.num_prompts)]
    found = _workload(wanted) if path is None else [*(_sharegpt if kind == SHAREGPT else _custom)(path, wanted)]
    if not found:
        raise ConfigError(f"dataset {path or kind} holds no request that can be used")
    rng.shuffle(found)
    return [*islice(cycle(found), wanted.num_prompts)]


def _made_up(rng: random.Random, wanted: DatasetOptions) -> BenchPrompt:
    words = [rng.choice(ONSETS) + rng.choice(RIMES) for _ in range(wanted.input_len)]
    return BenchPrompt(" ".join(words), wanted.output_len or 128)


def _sharegpt(path: Path, wanted: DatasetOptions) -> Iterator[BenchPrompt]:
    """Yield each conversation's first question, its answer as long as the one that was given."""
    for row in _rows(path):
        turns = [turn.get("value") for turn in row.get("conversations", ()) if isinstance(turn, dict)]
        match turns:
            case [str(question), str(answer), *_] if question and answer:
                yield BenchPrompt(question, wanted.output_len or max(4, len(answer) // CHARS_A_TOKEN))


def _custom(path: Path, wanted: DatasetOptions) -> Iterator[BenchPrompt]:
    """Yield a request a line: `prompt` or `messages`, and perhaps `output_tokens`."""
    for row in _rows(path):
        content = row.get("messages") or row.get("prompt")
        length = wanted.output_len or row.get("output_tokens") or 256
        if isinstance(content, str | list) and isinstance(length, int):
            yield BenchPrompt(content, length)


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
        rows = [json.loads(line) for line in text.splitlines() if line] if path.suffix == ".jsonl" else json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"dataset {path} cannot be read: {type(error).__name__}: {error}") from None
    if not isinstance(rows, list):
        raise ConfigError(f"dataset {path} must hold a list, got {type(rows).__name__}")
    return [row for row in rows if isinstance(row, dict)]


def _workload(wanted: DatasetOptions) -> list[BenchPrompt]:
    """Return the requests of `benchmarks/workload.json`, which only a checkout has."""
    path = Path(__file__).parents[2] / "benchmarks" / "workload.json"
    if not path.is_file():
        raise ConfigError("dataset workload is not installed: install slipstream from a checkout, or choose another")
    stored = json.loads(path.read_text(encoding="utf-8"))
    return [
        BenchPrompt(row["prompt"], wanted.output_len or row["output_tokens"])
        for kind in ("single", "concurrent", "editing")
        for row in stored[kind]
    ]
