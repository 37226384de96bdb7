"""The request bodies of the HTTP server, with strict types.

Sampling fields are validated by `SamplingParams`. Response bodies are in `runtime.http.responses`.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator

from protos.errors import InvalidRequestError
from protos.sampling import MAX_COUNT, SamplingParams, check_range
from runtime.frontend.speculation_override import SpeculationOverride
from runtime.http.fields.structured import StructuredFields
from runtime.http.fields.template import TemplateFields
from runtime.http.fields.unsupported import NEUTRAL, NO_TOOLS, Neutral, screen
from runtime.http.tools.choice import Tool, ToolChoice, ToolOptions, ToolUse, tool_use

MAX_PROMPTS = 1024
SEED_MODULUS = 2**64
LONGEST_TIMEOUT_S = 86_400.0
SAMPLING_NAMES = frozenset(field.name for field in fields(SamplingParams))


def _one_as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _text_as_parts(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _checked_prompt(value: object) -> object:
    """Accept text, token ids, or a list of either kind."""
    if isinstance(value, str) or _is_ids(value):
        return value
    if isinstance(value, list) and (all(isinstance(item, str) for item in value) or all(map(_is_ids, value))):
        return value
    raise ValueError("must be text, a list of texts, a list of token ids or a list of those")


SpecMetrics = Literal["none", "summary", "detailed"]
StreamUsage = Literal["none", "last", "all"]
STRICT = ConfigDict(extra="forbid", strict=True)


class RequestBody(BaseModel):
    """Base of all request bodies. A field that is null has its default."""

    model_config = STRICT

    model: str | None = None

    neutral: ClassVar[Neutral] = {}
    """Unsupported fields, and the values with which they are accepted."""

    @classmethod
    def screened(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return *fields* without those that have no effect here. Raises `InvalidRequestError`."""
        return screen(fields, cls.neutral, cls.model_fields)


class StreamOptions(BaseModel):
    """OpenAI's `stream_options`, and vLLM's `continuous_usage_stats`: usage in every chunk, too."""

    model_config = STRICT

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    """Ignored: `--stream-pacing aggregate` hides the lengths of tokens."""


class SpeculativeOptions(BaseModel):
    """The speculation override of one request. It never changes the answer."""

    model_config = STRICT

    enabled: bool = True
    num_speculative_tokens: int | None = None
    method: str | None = None


class TextPart(BaseModel):
    """A content part of type text."""

    model_config = STRICT

    type: Literal["text"]
    text: str


class PredictionField(BaseModel):
    """The predicted output: makes the answer faster, and changes no token."""

    model_config = STRICT

    type: Literal["content"]
    content: Annotated[list[TextPart], BeforeValidator(_text_as_parts, json_schema_input_type=str | list[TextPart])]

    @property
    def text(self) -> str:
        """The text of all parts."""
        return "".join(part.text for part in self.content)


class SamplingFields(BaseModel):
    """Fields with the same name and meaning at every endpoint that generates."""

    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_one_as_list)] = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    truncate_prompt_tokens: int | None = None
    cache_salt: str | None = None
    timeout: Annotated[float, Field(gt=0.0, le=LONGEST_TIMEOUT_S)] | None = None
    prediction: PredictionField | None = None
    speculative_config: SpeculativeOptions | None = None
    per_request_spec_decode_metrics: SpecMetrics | None = None
    token_origins: bool | None = None


class GenerationRequest(RequestBody, StructuredFields, SamplingFields):
    """Fields that completions and chat completions share."""

    stream_options: StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None

    endpoint_names: ClassVar[frozenset[str]] = frozenset()
    """Sampling fields with another meaning at this endpoint."""

    @property
    def stream_usage(self) -> StreamUsage:
        """Which chunks of a stream have the usage."""
        if self.stream_options is None or not self.stream_options.include_usage:
            return "none"
        return "all" if self.stream_options.continuous_usage_stats else "last"

    @property
    def speculation_override(self) -> SpeculationOverride:
        """The request's `speculative_config`."""
        return (
            SpeculationOverride()
            if self.speculative_config is None
            else SpeculationOverride(**self.speculative_config.model_dump())
        )

    def sampling(self, defaults: Mapping[str, Any], **mapped: object) -> SamplingParams:
        """Return the sampling parameters, with *defaults* for those not given.

        *mapped* are the values of `endpoint_names`.

        Raises:
            InvalidRequestError: names the field, the value and the limit.
        """
        self._check()
        given = {
            name: getattr(self, name) for name in SAMPLING_NAMES & type(self).model_fields.keys() - self.endpoint_names
        }
        if self.seed is not None and -(SEED_MODULUS // 2) <= self.seed < -1:
            given["seed"] = self.seed % SEED_MODULUS
        given["prediction"] = None if self.prediction is None else self.prediction.text
        given["structured_outputs"] = self.structured_outputs_fields()
        chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(**(dict(defaults) | chosen | mapped))

    def _check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options is only for stream=true", "stream_options")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequestError(f"best_of is not supported, got {self.best_of}: use n", "best_of")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequestError("prompt_logprobs are not available with stream=true", "prompt_logprobs")
        check_range("prompt_logprobs", self.prompt_logprobs, 0, MAX_COUNT)


class CompletionRequest(GenerationRequest):
    """The body of `POST /v1/completions`."""

    prompt: Annotated[
        str | list[str] | list[int] | list[list[int]],
        PlainValidator(_checked_prompt, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ]
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None

    endpoint_names: ClassVar[frozenset[str]] = frozenset({"logprobs", "prompt_logprobs", "max_tokens"})
    neutral: ClassVar[Neutral] = {**NEUTRAL, **NO_TOOLS}

    @property
    def only_scores(self) -> bool:
        """Whether the prompt is echoed and nothing generated."""
        return bool(self.echo) and self.max_tokens == 0

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, at least one. Raises `InvalidRequestError`."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if not given:
            raise InvalidRequestError("prompt must not be empty, got []", "prompt")
        if isinstance(given[0], int):
            return [given]
        if len(given) > MAX_PROMPTS:
            raise InvalidRequestError(f"prompt must hold at most {MAX_PROMPTS} prompts, got {len(given)}", "prompt")
        return list(given)

    def completion_sampling(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return the sampling parameters; `echo` with `logprobs` includes those of the prompt."""
        if self.logprobs is not None and self.logprobs < 0:
            raise InvalidRequestError(f"logprobs must be at least 0, got {self.logprobs}", "logprobs")
        prompt_logprobs = self.prompt_logprobs
        if self.echo and self.logprobs is not None:
            prompt_logprobs = max(self.logprobs, prompt_logprobs or 0)
        mapped = {} if self.max_tokens is None else {"max_tokens": 1 if self.only_scores else self.max_tokens}
        return self.sampling(defaults, logprobs=self.logprobs, prompt_logprobs=prompt_logprobs, **mapped)


class ChatCompletionRequest(GenerationRequest, TemplateFields):
    """The body of `POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    endpoint_names: ClassVar[frozenset[str]] = frozenset({"logprobs", "max_tokens"})
    neutral: ClassVar[Neutral] = {**NEUTRAL, "add_special_tokens": (None, False), "echo": (None, False)}

    @property
    def num_logprobs(self) -> int | None:
        """Number of candidates per token, None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def tool_use(self, options: ToolOptions) -> ToolUse:
        """Return how the tools may be called. Raises `InvalidRequestError`."""
        return tool_use(self.tools, self.tool_choice, options, is_parallel=self.parallel_tool_calls is not False)

    def chat_sampling(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return the sampling parameters; without a limit, up to the end of the context."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs=true", "top_logprobs")
        check_range("top_logprobs", self.top_logprobs, 0, MAX_COUNT)
        check_range("max_completion_tokens", self.max_completion_tokens, 1, MAX_COUNT)
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self.sampling(defaults, logprobs=self.num_logprobs, max_tokens=limit)


class TokenizeRequest(RequestBody, TemplateFields):
    """The body of `POST /tokenize`: a text or a conversation."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    neutral: ClassVar[Neutral] = {"chat_template": NEUTRAL["chat_template"]}


class DetokenizeRequest(RequestBody):
    """The body of `POST /detokenize`."""

    tokens: list[int]
