"""Prompts of `slipstream bench serve`: random text, ShareGPT conversations, JSON lines, or our own workload."""

import json
import random
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any

from cluster.bench.questions import SHAREGPT_FIELDS, USERS, asked, said_by
from cluster.files import LINES, LIST, read_rows
from protos.errors import ConfigError
from protos.validation import shown

RANDOM, SHAREGPT, CUSTOM, WORKLOAD = "random", "sharegpt", "custom", "workload"
NAMES = (RANDOM, SHAREGPT, CUSTOM, WORKLOAD)
SUFFIXES = {LIST: SHAREGPT, LINES: CUSTOM}
FIELDS = ("conversations", "messages", "prompt")
DEFAULT_LENGTH = 256
"""Tokens of an answer whose length the data set does not say."""
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
    found = _workload(options) if path is None else _requests(path, options)
    if not found:
        raise ConfigError(f"dataset {path or kind} holds no request that can be used")
    rng.shuffle(found)
    return [*islice(cycle(found), options.num_prompts)]


def _random(rng: random.Random, options: DatasetOptions) -> BenchPrompt:
    words = [rng.choice(ONSETS) + rng.choice(RIMES) for _ in range(options.input_len)]
    return BenchPrompt(" ".join(words), options.output_len or 128)


def _requests(path: Path, options: DatasetOptions) -> list[BenchPrompt]:
    found = (_request(item, place, options) for place, item in read_rows(path))
    return [request for request in found if request is not None]


def _request(item: Any, place: str, options: DatasetOptions) -> BenchPrompt | None:
    """Return the request of one line or item; None for a conversation without a question and its recorded answer.

    Raises:
        ConfigError: names the place and what is wrong.
    """
    item, field = asked(item, place, FIELDS)
    if field == "conversations":
        return _of_sharegpt(item[field], place, options)
    if field == "messages" and not _are_messages(item[field]):
        raise ConfigError(f"{place}: messages must be a list of objects with a role, got {shown(item[field])}")
    if field == "prompt" and not isinstance(item[field], str):
        raise ConfigError(f"{place}: prompt must be text, got {shown(item[field])}")
    if not item[field]:
        raise ConfigError(f"{place}: {field} must not be empty")
    return BenchPrompt(item[field], options.output_len or _length(item, place))


def _are_messages(value: object) -> bool:
    """Whether *value* looks like messages; what they may hold is the server's to say."""
    return isinstance(value, list) and all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in value)


def _of_sharegpt(turns: Any, place: str, options: DatasetOptions) -> BenchPrompt | None:
    """Return the first question of a user, with the length of its recorded answer."""
    said = said_by(turns, place, *SHAREGPT_FIELDS)
    for (who, question), (other, answer) in pairwise(said):
        if who in USERS and question.strip():
            is_answer = other not in USERS and answer
            length = options.output_len or max(4, len(answer) // CHARS_PER_TOKEN)
            return BenchPrompt(question, length) if is_answer else None
    return None


def _length(item: dict[str, Any], place: str) -> int:
    length = item.get("output_tokens")
    if length is None:
        return DEFAULT_LENGTH
    if type(length) is not int or length < 1:
        raise ConfigError(f"{place}: output_tokens must be a whole number of at least 1, got {shown(length)}")
    return length


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
