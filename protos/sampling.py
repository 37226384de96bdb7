"""`SamplingParams` and `StructuredOutputsParams`: the options of one request, under vLLM's names."""

import copy
import json
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, StrictBool, model_validator
from pydantic.dataclasses import dataclass

from protos.errors import InvalidRequestError, request_error
from protos.validation import shown, typed

MAX_N = 128
MAX_COUNT = 2**31 - 1
GREEDY_BELOW = 1e-5
MAX_GRAMMAR_CHARS = 1 << 18
MAX_REGEX_CHARS = 1 << 14
MAX_CHOICES = 4096
MAX_ALLOWED_IDS = 1 << 19
"""More than the largest vocabularies have; the preprocessor knows the vocabulary."""
MAX_DEPTH = 96
"""Nesting limit of JSON schemas, and of brackets in a regular expression or grammar: parsers recurse into both."""
SOURCES = ("json", "regex", "choice", "grammar", "json_object")
"""The fields of `StructuredOutputsParams` that define a grammar."""

# vLLM's arguments that have no effect here; accepted and ignored.
HARMLESS = frozenset(
    {
        "output_kind",
        "best_of",  # where it is n
        "skip_clone",
        "flat_logprobs",
        "early_stopping",
        "length_penalty",
        "skip_reading_prefix_cache",
    }
)
# vLLM's arguments that would change the tokens; refused unless left at a neutral value.
REFUSED = {
    "use_beam_search": "beam search is not available",
    "guided_decoding": "use structured_outputs",
    "logits_processors": "use logit_bias, bad_words or allowed_token_ids",
    "extra_args": "there are no extra arguments",
    "repetition_detection": "use the penalties or stop strings",
    "thinking_token_budget": "use max_tokens",
    "logprob_token_ids": "use logprobs",
}


def _as_tuple(value: object) -> object:
    """Return an empty tuple for None, and a tuple of one for a string."""
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else value


def _off_is_zero(value: object) -> object:
    return 0 if value is None or (isinstance(value, int) and value == -1) else value


def _random_is_none(value: object) -> object:
    """Return None for the seed -1, as in vLLM."""
    return None if isinstance(value, int) and value == -1 else value


def _greedy_is_zero(value: float) -> float:
    """Return 0 for temperatures too small to divide by, as in vLLM."""
    return 0.0 if value < GREEDY_BELOW else value


TokenId = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Text = Annotated[str, Field(min_length=1, max_length=1024)]
Temperature = Annotated[float, Field(ge=0.0, le=100.0), AfterValidator(_greedy_is_zero)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]


Source = Annotated[str, Field(max_length=MAX_GRAMMAR_CHARS)]


def _as_json(value: object) -> object:
    """Return the JSON text of a schema given as a dictionary or a pydantic model class."""
    if isinstance(value, type) and hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    if not isinstance(value, dict | bool):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise ValueError(f"must be nested at most {MAX_DEPTH} levels deep") from None
    except (TypeError, ValueError):
        raise ValueError("must be a JSON schema: a dictionary of JSON values, or JSON text") from None


def _without_backend(given: dict[str, Any]) -> dict[str, Any]:
    """Drop vLLM's backend options; refuse `structural_tag`."""
    if given.get("structural_tag") is not None:
        raise InvalidRequestError("structural_tag is not supported: write a grammar", "structured_outputs")
    foreign = {"structural_tag", "disable_fallback", "_backend", "_backend_was_auto"}
    return {name: value for name, value in given.items() if name not in foreign}


def _structured_error(message: str, param: str | None) -> Exception:
    """Make an error whose request field is `structured_outputs`."""
    return request_error(f"structured_outputs: {message}", "structured_outputs")


@typed(_structured_error, _without_backend)
@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class StructuredOutputsParams:
    """Constraints on the format of an answer, under vLLM's names; exactly one of the first five must be given.

    `json` is a JSON schema: a dictionary, JSON text or a pydantic model class. `regex` is matched from end to end, in
    the dialect of Rust's `regex` (no look-around, no back-references). `choice` lists the possible answers.
    `grammar` is a context-free grammar in the Lark dialect of llguidance. `json_object` allows any JSON object.

    For JSON: `disable_any_whitespace` forbids whitespace between tokens, `whitespace_pattern` is a regex of the
    whitespace allowed there (default: a space, or a line break with indentation), and `disable_additional_properties`
    forbids properties that an object's schema does not name.

    Raises:
        InvalidRequestError: names the value and the limit; `param` is "structured_outputs".
    """

    json: Annotated[Source | None, BeforeValidator(_as_json)] = None
    regex: str | None = Field(default=None, max_length=MAX_REGEX_CHARS)
    choice: tuple[str, ...] | None = Field(default=None, min_length=1, max_length=MAX_CHOICES)
    grammar: Source | None = None
    json_object: StrictBool | None = None
    disable_any_whitespace: StrictBool = False
    disable_additional_properties: StrictBool = False
    whitespace_pattern: str | None = Field(default=None, max_length=256)

    @model_validator(mode="after")
    def _agree(self) -> "StructuredOutputsParams":
        given = [name for name in SOURCES if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(f"exactly one of {', '.join(SOURCES)} must be given, got {' and '.join(given) or 'none'}")
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise ValueError("whitespace_pattern and disable_any_whitespace contradict each other")
        return self


def check_range(name: str, value: int | None, least: int, most: int) -> None:
    """Check a request's field *name*, which sets an argument of another name. Raises `InvalidRequestError`."""
    if value is not None and not least <= value <= most:
        limit = f"least {least}" if value < least else f"most {most}"
        raise InvalidRequestError(f"{name} must be at {limit}, got {value}", name)


def _without_foreign(given: dict[str, Any]) -> dict[str, Any]:
    """Drop vLLM's arguments that have no effect here; refuse those that would change the tokens."""
    for name, instead in REFUSED.items():
        if given.get(name) not in (None, False, (), [], {}):
            raise InvalidRequestError(f"{name} is not supported, got {shown(given[name])}: {instead}", name)
    if given.get("best_of") not in (None, given.get("n") or 1):
        raise InvalidRequestError(f"best_of is not supported, got {shown(given['best_of'])}: use n", "best_of")
    for name in ("logprobs", "prompt_logprobs"):
        if isinstance(given.get(name), bool):  # these only may be booleans, as in vLLM
            given = {**given, name: int(given[name])}
    structured = given.get("structured_outputs")
    if isinstance(structured, dict):
        given = {**given, "structured_outputs": StructuredOutputsParams(**structured)}
    return {name: value for name, value in given.items() if name not in HARMLESS and name not in REFUSED}


@typed(request_error, _without_foreign, not_numbers=(bool, str, bytes))
@dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class SamplingParams:
    """Sampling options of one request, under vLLM's names; all are validated here.

    Sequences may be given as lists, a single string, or None; they are stored as tuples. `top_k` -1 and 0 mean off,
    `temperature` 0 (and below 1e-5) greedy. `seed` is a uint64; without one, or with -1, it is random. `max_tokens`
    None means up to the end of the context. `logprobs` and `prompt_logprobs` are the number of most likely tokens
    returned in addition to the sampled one, -1 for the whole vocabulary, up to the engine's `max_logprobs`.
    `truncate_prompt_tokens` keeps the prompt's last tokens, -1 as many as fit. `prediction` is the expected answer,
    text or token ids: where a method is model-free, it is drafted from first; it changes no token.
    `spaces_between_special_tokens` is accepted and has no effect. `structured_outputs` constrains the format of the
    answer; a dictionary of its fields will do. To change one option: `dataclasses.replace(params, temperature=0.0)`.

    Raises:
        InvalidRequestError: names the value and the limit; `param` is the argument.
    """

    n: int = Field(default=1, ge=1, le=MAX_N)
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: float = Field(default=1.0, ge=0.001, le=1000.0)
    temperature: Temperature = 1.0
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: Annotated[int, BeforeValidator(_off_is_zero), Field(ge=0, le=MAX_COUNT)] = 0
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    seed: Annotated[Annotated[int, Field(ge=0, le=2**64 - 1)] | None, BeforeValidator(_random_is_none)] = None
    stop: Annotated[tuple[Text, ...], BeforeValidator(_as_tuple), Field(max_length=64)] = ()
    stop_token_ids: Annotated[tuple[TokenId, ...], BeforeValidator(_as_tuple), Field(max_length=1024)] = ()
    bad_words: Annotated[tuple[Text, ...], BeforeValidator(_as_tuple), Field(max_length=256)] = ()
    include_stop_str_in_output: StrictBool = False
    ignore_eos: StrictBool = False
    max_tokens: int | None = Field(default=16, ge=1, le=MAX_COUNT)
    min_tokens: int = Field(default=0, ge=0, le=MAX_COUNT)
    logprobs: int | None = Field(default=None, ge=-1, le=MAX_COUNT)
    prompt_logprobs: int | None = Field(default=None, ge=-1, le=MAX_COUNT)
    detokenize: StrictBool = True
    skip_special_tokens: StrictBool = True
    spaces_between_special_tokens: StrictBool = True
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, le=MAX_COUNT)
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=1024)] | None = None
    allowed_token_ids: Annotated[tuple[TokenId, ...], Field(min_length=1, max_length=MAX_ALLOWED_IDS)] | None = None
    prediction: str | tuple[TokenId, ...] | None = None
    structured_outputs: StructuredOutputsParams | None = None

    @model_validator(mode="after")
    def _agree(self) -> "SamplingParams":
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")
        if self.stop and not self.detokenize:
            raise ValueError("stop strings are searched for in the text: they need detokenize=True")
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens must be at least 1, or -1 for as many as fit, got 0")
        return self

    def clone(self) -> "SamplingParams":
        """Return a copy, as vLLM's code calls it. Nothing can be changed in either."""
        return copy.copy(self)
