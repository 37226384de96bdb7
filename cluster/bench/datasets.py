"""Prompts of `slipstream bench serve`: random text, ShareGPT conversations, JSON lines, or our own workload."""

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
CHARS_PER_TOKEN = 4
"""Characters per token, to estimate the length of a data set's answers."""
ONSETS = ("b", "c", "d", "f", "g", "l", "m", "n", "p", "r", "s", "t", "v", "w", "st", "tr", "pl")
RIMES = ("a", "e", "i", "o", "u", "an", "en", "in", "on", "ar", "er", "or", "al", "el", "ing")


@dataclass(frozen=True)
class BenchPrompt:
    """One request: text or the messages of a conversation, and its max_tokens."""

    content: str | list[dict[str, str]]
    max_tokens: int


@dataclass(frozen=True)
class DatasetOptions:
    """Which prompts to use. `output_len` overrides the data set's answer lengths.

    `input_len` is the number of words of random text; most tokenizers make one or two tokens of each.
    """

    dataset: str = RANDOM
    path: Path | None = None
    num_prompts: int = 100
    input_len: int = 256
    output_len: int | None = None
    seed: int = 0


def resolve(dataset: str, path: Path | None) -> tuple[str, Path | None]:
    """Return the kind and file of a data set, given by name or as a file whose suffix determines the kind.

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


def load(options: DatasetOptions) -> list[BenchPrompt]:
    """Return `num_prompts` prompts; a smaller data set is repeated.

    Raises:
        ConfigError: the file is malformed, or holds no usable request.
    """
    kind, path = resolve(options.dataset, options.path)
    rng = random.Random(options.seed)
    if kind == RANDOM:
        return [_random(rng, options) for _ in range(options.num_prompts)]
    found = _workload(options) if path is None else [*(_sharegpt if kind == SHAREGPT else _custom)(path, options)]
    if not found:
        raise ConfigError(f"dataset {path or kind} holds no request that can be used")
    rng.shuffle(found)
    return [*islice(cycle(found), options.num_prompts)]


def _random(rng: random.Random, options: DatasetOptions) -> BenchPrompt:
    words = [rng.choice(ONSETS) + rng.choice(RIMES) for _ in range(options.input_len)]
    return BenchPrompt(" ".join(words), options.output_len or 128)


def _sharegpt(path: Path, options: DatasetOptions) -> Iterator[BenchPrompt]:
    """Yield the first question of each conversation, with the length of its recorded answer."""
    for row in _rows(path):
        turns = [turn.get("value") for turn in row.get("conversations", ()) if isinstance(turn, dict)]
        match turns:
            case [str(question), str(answer), *_] if question and answer:
                yield BenchPrompt(question, options.output_len or max(4, len(answer) // CHARS_PER_TOKEN))


def _custom(path: Path, options: DatasetOptions) -> Iterator[BenchPrompt]:
    """Yield one request per line: `prompt` or `messages`, and optionally `output_tokens`."""
    for row in _rows(path):
        content = row.get("messages") or row.get("prompt")
        length = options.output_len or row.get("output_tokens") or 256
        if isinstance(content, str | list) and isinstance(length, int):
            yield BenchPrompt(content, length)


def _rows(path: Path) -> list[dict[str, Any]]:
    return [row for row in read_list(path) if isinstance(row, dict)]


def read_list(path: Path) -> list[Any]:
    """Return the list in a JSON file, or the values of a JSONL file. Raises `ConfigError`."""
    try:
        text = path.read_text(encoding="utf-8")
        rows = [json.loads(line) for line in text.splitlines() if line] if path.suffix == ".jsonl" else json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"dataset {path} cannot be read: {type(error).__name__}: {error}") from None
    if not isinstance(rows, list):
        raise ConfigError(f"dataset {path} must hold a list, got {type(rows).__name__}")
    return rows


def _workload(options: DatasetOptions) -> list[BenchPrompt]:
    """Return the requests of `benchmarks/workload.json`, which exists only in a checkout."""
    path = Path(__file__).parents[2] / "benchmarks" / "workload.json"
    if not path.is_file():
        raise ConfigError("dataset workload is not installed: install slipstream from a checkout, or choose another")
    stored = json.loads(path.read_text(encoding="utf-8"))
    return [
        BenchPrompt(row["prompt"], options.output_len or row["output_tokens"])
        for kind in ("single", "concurrent", "editing")
        for row in stored[kind]
    ]
