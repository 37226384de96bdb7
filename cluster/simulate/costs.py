"""What rounds cost on one machine, by batch size, context and tokens; with where and of what it was measured."""

import json
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cluster.files import read_json
from protos.config.engine import SpeculativeConfig
from protos.errors import ConfigError
from protos.validation import shown

FORMAT = 3
Shape = tuple[int, int]
"""Rows of a batch, and known tokens of each."""
Seconds = Mapping[Shape, Mapping[int, float]]
"""By shape: tokens of a row that the target is fed, or that are drafted for it -> seconds of a round."""
PromptSeconds = Mapping[int, float]
"""By tokens of a prompt: how much longer the rounds take in which it is read."""
NOT_IN_KEYS = frozenset({
    "method", "model", "num_speculative_tokens", "policy", "disable_by_batch_size",
    "num_speculative_tokens_per_batch_size", "placement", "draft_tensor_parallel_size", "has_default_shape",
    "draft_block_size", "synthetic_acceptance_rates", "synthetic_acceptance_length",
})  # fmt: skip
"""What a key of a draft has first, what is the same for all drafts of a replay, and what costs nothing."""


def draft_key(speculative: SpeculativeConfig) -> str:
    """Return what identifies a draft in a table of costs, whatever its number of draft tokens and its policy.

    It has all other settings that are not the defaults: a quantised draft costs less than the same one as stored.
    """
    defaults = asdict(SpeculativeConfig(method="", num_speculative_tokens=1))
    settings = [
        f", {name} {value}"
        for name, value in asdict(speculative).items()
        if name not in NOT_IN_KEYS and value != defaults[name]
    ]
    return f"{'+'.join(speculative.methods)} {speculative.model or ''}".strip() + "".join(settings)


@dataclass(frozen=True)
class CostTable:
    """Seconds of rounds in which all rows decode, and what prompts add.

    Attributes:
        model: the target's Hub id or folder.
        dtype: of the target.
        setting: how the target was loaded and run.
        machine: processor, devices and versions.
        target: of rounds without their drafting, sampling and the controller's work included.
        drafts: of drafting, by `draft_key`.
        prompts: of prompts, without drafts.
        draft_prompts: what drafting adds to those, by `draft_key`.
    """

    model: str
    dtype: str
    setting: Mapping[str, str]
    machine: Mapping[str, str]
    target: Seconds
    drafts: Mapping[str, Seconds] = field(default_factory=dict)
    prompts: PromptSeconds = field(default_factory=dict)
    draft_prompts: Mapping[str, PromptSeconds] = field(default_factory=dict)

    @property
    def shapes(self) -> list[Shape]:
        """The measured shapes, smallest first."""
        return sorted(self.target)

    def plain_s(self, shape: Shape) -> float:
        """Return the seconds of a round without draft tokens."""
        return self.target_s(shape, 1.0)

    def target_s(self, shape: Shape, tokens: float) -> float:
        """Return the seconds of a round that feeds *tokens* for each row; linear between measured numbers."""
        by_tokens = self.target[shape]
        sizes = sorted(by_tokens)
        if not sizes[0] <= tokens <= sizes[-1]:
            raise ConfigError(
                f"the table of costs has {sizes[0]} to {sizes[-1]} tokens of a row, and {tokens:g} are needed: measure "
                "it again, into another file"
            )
        return float(np.interp(tokens, sizes, [by_tokens[size] for size in sizes]))

    def draft_s(self, key: str, shape: Shape, k: int) -> float:
        """Return the seconds of drafting up to *k* tokens for each row. Raises `ConfigError` if it was not measured."""
        found = self.drafts.get(key, {}).get(shape, {}).get(k)
        if found is None:
            raise ConfigError(
                f"the table of costs has no {key!r} with K = {k}, but {', '.join(sorted(self.drafts)) or 'no drafts'}: "
                "measure it again, into another file"
            )
        return found

    def prompt_s(self, tokens: int) -> float:
        """Return the seconds of a prompt without drafts."""
        return _of_prompt(self.prompts, tokens)

    def draft_prompt_s(self, key: str, tokens: int) -> float:
        """Return the seconds that drafting adds to a prompt."""
        return _of_prompt(self.draft_prompts.get(key, {}), tokens)

    def check(self, model: str, setting: Mapping[str, str], machine: Mapping[str, str]) -> list[str]:
        """Return how *setting* and *machine* differ from the table's; empty if they do not.

        Raises:
            ConfigError: the costs are those of another model.
        """
        if model != self.model:
            raise ConfigError(f"the costs are those of {self.model}, the answers those of {model}")
        measured = {**self.setting, **self.machine}
        return [
            f"{name} {measured.get(name, '?')}, here {here}"
            for name, here in {**setting, **machine}.items()
            if measured.get(name) != here
        ]

    def as_json(self) -> str:
        """Return the text of a file that `read_costs` reads."""
        drafts = {key: _rows(seconds) for key, seconds in self.drafts.items()}
        content = {
            "format": FORMAT,
            "model": self.model,
            "dtype": self.dtype,
            "setting": dict(self.setting),
            "machine": dict(self.machine),
            "columns": ["rows", "context", "tokens", "seconds"],
            "target": _rows(self.target),
            "drafts": drafts,
            "prompts": list(self.prompts.items()),
            "draft_prompts": {key: list(seconds.items()) for key, seconds in self.draft_prompts.items()},
        }
        return json.dumps(content, indent=1) + "\n"


def _of_prompt(seconds: PromptSeconds, tokens: int) -> float:
    """Return the seconds of a prompt: linear between measured numbers of tokens, proportional above."""
    if not seconds:
        return 0.0
    longest = max(seconds)
    sizes = [0, *sorted(seconds)]
    within_s = np.interp(min(tokens, longest), sizes, [0.0, *(seconds[size] for size in sizes[1:])])
    return float(within_s) * max(1.0, tokens / longest)


def _rows(seconds: Seconds) -> list[list[float]]:
    return [[*shape, tokens, s] for shape, by_tokens in sorted(seconds.items()) for tokens, s in by_tokens.items()]


def read_costs(path: Path) -> CostTable:
    """Read a table. Raises `ConfigError`: it cannot be read, or something in it is wrong."""
    content = read_json(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = shown(content["format"]) if isinstance(content, dict) and "format" in content else "another file"
        raise ConfigError(
            f"{path} is not a table of costs of format {FORMAT}, but {found}: `slipstream simulate --target --costs` "
            "measures again, into another file"
        )
    try:
        return CostTable(
            str(content["model"]),
            str(content["dtype"]),
            {str(name): str(value) for name, value in content["setting"].items()},
            {str(name): str(value) for name, value in content["machine"].items()},
            _seconds(content["target"]),
            {str(key): _seconds(rows) for key, rows in content["drafts"].items()},
            _prompt_seconds(content["prompts"]),
            {str(key): _prompt_seconds(rows) for key, rows in content["draft_prompts"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is not a table of costs: {type(error).__name__}: {shown(str(error))}") from None


def _seconds(rows: Iterable[Seq[Any]]) -> Seconds:
    found: dict[Shape, dict[int, float]] = {}
    for num_rows, context, tokens, seconds in rows:
        _check(seconds, num_rows, context, tokens)
        found.setdefault((int(num_rows), int(context)), {})[int(tokens)] = float(seconds)
    if not found:
        raise ValueError("no rows")
    return found


def _prompt_seconds(rows: Iterable[Seq[Any]]) -> PromptSeconds:
    for tokens, seconds in rows:
        _check(seconds, tokens)
    return {int(tokens): float(seconds) for tokens, seconds in rows}


def _check(seconds: float, *sizes: float) -> None:
    if min(sizes) < 1 or not 0 <= seconds < float("inf"):
        raise ValueError(f"a row is {[*sizes, seconds]}")
