"""Reads logs of answers: our own (`runtime.text.output_log`), or any JSON lines with a prompt and an output."""

import logging
import math
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.files import read_objects
from protos.errors import ConfigError, InvalidRequestError
from protos.sampling import SamplingParams
from protos.validation import shown
from runtime.text.output_log import NOT_LOGGED

logger = logging.getLogger(__name__)

PROMPT_FIELDS = ("prompt_token_ids", "prompt")
OUTPUT_FIELDS = ("output_token_ids", "output")
LOGPROBS_FIELDS = ("logprobs", "top_logprobs")
SETTINGS = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens")
"""Sampling parameters that other programs' logs may have next to prompt and output."""
FOREIGN = frozenset({"structured_outputs", "seed", "max_tokens", *NOT_LOGGED})
"""Parameters that are replayed in another way than by giving them to the engine again, or not at all."""

LOGPROBS_FORM = "a list with an object of numbers up to 0 by token id for each output token"
LARGEST_MASS = 1.01
"""Of the logged probabilities of one token: more than 1 by rounding only."""

Content = str | tuple[int, ...]
Logprobs = Seq[Mapping[int, float]]
"""For each output token, log-probabilities of the target's raw logits by token id."""


@dataclass(frozen=True)
class LogFields:
    """The names of the fields that hold prompts, outputs and log-probabilities; the first that a line has counts.

    Attributes:
        temperature: of answers that do not state one; None: unknown, taken as 0.
    """

    prompt: tuple[str, ...] = PROMPT_FIELDS
    output: tuple[str, ...] = OUTPUT_FIELDS
    logprobs: tuple[str, ...] = LOGPROBS_FIELDS
    temperature: float | None = None


def log_fields(
    prompt: str | None, output: str | None, logprobs: str | None = None, temperature: float | None = None
) -> LogFields:
    """Return the fields of a log, those of our own logs where None is given."""
    return LogFields(
        PROMPT_FIELDS if prompt is None else (prompt,),
        OUTPUT_FIELDS if output is None else (output,),
        LOGPROBS_FIELDS if logprobs is None else (logprobs,),
        temperature,
    )


@dataclass(frozen=True)
class LoggedAnswer:
    """A line of a log.

    Attributes:
        prompt, output: text or token ids.
        params: how it was sampled; temperature 0 where the log does not say.
        seed: None if it is not logged.
        max_tokens: the limit under which it was sampled; None if the log does not say.
        is_cut: whether it ended at that limit.
        model: the target's name; "" if it is not logged.
        place: file and line.
        states_temperature: whether the log says how it was sampled.
        logprobs: None if they are not logged.
    """

    prompt: Content
    output: Content
    params: SamplingParams
    seed: int | None
    max_tokens: int | None
    is_cut: bool
    model: str
    place: str
    states_temperature: bool
    logprobs: Logprobs | None = None


def read(path: Path, fields: LogFields, limit: int | None = None) -> list[LoggedAnswer]:
    """Return the answers of a log, at most the first *limit*; those without tokens are left out with a warning.

    Raises:
        ConfigError: names the line and what is wrong with it, or the log has no answers.
    """
    found: list[LoggedAnswer] = []
    num_empty = num_unused = 0
    for place, item in read_objects(path):
        answer = _parse(item, place, fields)
        num_empty += not answer.output
        num_unused += answer.logprobs is None and _first(item, fields.logprobs) is not None
        if answer.output:
            found.append(answer)
        if limit is not None and len(found) == limit:
            break
    if num_empty:
        logger.warning("%s: %d answers are empty and left out", path, num_empty)
    if num_unused:
        logger.warning("%s: the log-probabilities of %d answers are not %s: not used", path, num_unused, LOGPROBS_FORM)
    if not found:
        raise ConfigError(f"{path} has no answers to replay")
    return found


def _parse(item: Any, place: str, fields: LogFields) -> LoggedAnswer:
    if not isinstance(item, dict):
        raise ConfigError(f"{place} must be a JSON object, got {shown(item)}")
    sampling = item.get("sampling") or {name: item[name] for name in SETTINGS if item.get(name) is not None}
    if not isinstance(sampling, dict):
        raise ConfigError(f"{place}: sampling must be an object, got {shown(sampling)}")
    if fields.temperature is not None:
        sampling = {"temperature": fields.temperature, **sampling}
    return LoggedAnswer(
        _content(item, fields.prompt, place, "prompt"),
        _content(item, fields.output, place, "output"),
        _params(sampling, place),
        _integer(sampling.get("seed"), f"{place}: seed"),
        _integer(sampling.get("max_tokens"), f"{place}: max_tokens"),
        item.get("finish_reason") == "length",
        str(item.get("model") or ""),
        place,
        "temperature" in sampling,
        _logprobs(item, fields.logprobs, place),
    )


def _content(item: dict[str, Any], names: Iterable[str], place: str, what: str) -> Content:
    """Return the first of the fields *names* that there is: text or token ids."""
    value = _first(item, names)
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(token) is int and token >= 0 for token in value):
        return tuple(value)
    if value is None:
        raise ConfigError(
            f"{place} has no field {' or '.join(map(repr, names))}, but {', '.join(sorted(item)) or 'none'}: name the "
            f"right one with --{what}-field"
        )
    raise ConfigError(f"{place}: the {what} must be text or a list of token ids, got {shown(value)}")


def _logprobs(item: dict[str, Any], names: Iterable[str], place: str) -> Logprobs | None:
    """Return the first of the fields *names* that there is; None without one, or for another form under our own names.

    Raises:
        ConfigError: a field that the user named has another form.
    """
    value = _first(item, names)
    if value is None:
        return None
    try:
        found = [{int(token): float(logprob) for token, logprob in each.items()} for each in value]
    except (AttributeError, TypeError, ValueError, OverflowError):
        found = []
    if found and all(each and _are_logprobs(each) for each in found):
        return found
    if names == LOGPROBS_FIELDS:
        return None
    raise ConfigError(f"{place}: log-probabilities must be {LOGPROBS_FORM}, got {shown(value)}")


def _first(item: dict[str, Any], names: Iterable[str]) -> Any:
    return next((item[name] for name in names if item.get(name) is not None), None)


def _are_logprobs(found: Mapping[int, float]) -> bool:
    mass = sum(math.exp(min(logprob, 1.0)) for logprob in found.values())
    return min(found) >= 0 and mass < LARGEST_MASS


def _params(sampling: dict[str, Any], place: str) -> SamplingParams:
    given = {name: value for name, value in sampling.items() if name not in FOREIGN}
    try:
        return SamplingParams(**{"temperature": 0.0, "max_tokens": None, **given})
    except InvalidRequestError as error:
        raise ConfigError(f"{place}: sampling: {error}") from None


def _integer(value: object, place: str) -> int | None:
    if value is None or (type(value) is int and value >= 0):
        return value
    raise ConfigError(f"{place} must be a whole number of at least 0, got {shown(value)}")
