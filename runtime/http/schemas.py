"""What the HTTP face takes, field by field: strict types, unknown fields refused.

What a request asks of sampling is checked by `SamplingParams`. `runtime.http.responses` has the other direction.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainValidator

from protos.errors import InvalidRequestError
from protos.sampling import SamplingParams
from protos.validation import shown

MAX_PROMPTS = 1024
SEED_MODULUS = 2**64
SAMPLING_NAMES = frozenset(field.name for field in fields(SamplingParams))

# Fields of the OpenAI SDK that change no token here.
HARMLESS = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "parallel_tool_calls", "prediction", "moderation", "reasoning_effort", "verbosity",
})  # fmt: skip

# Fields that would change the answer: refused unless they say what happens anyway.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "web_search_options": (None,),
    "use_beam_search": (None, False),
}



def _one_as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _checked_prompt(value: object) -> object:
    """Accept text, token ids, or a list of either kind."""
    if isinstance(value, str) or _is_ids(value):
        return value
    if isinstance(value, list) and (all(isinstance(item, str) for item in value) or all(map(_is_ids, value))):
        return value
    raise ValueError("must be text, a list of texts, a list of token ids or a list of those")


SpecMetrics = Literal["none", "summary"]


class StreamOptions(BaseModel):
    """How a stream ends."""

    include_usage: bool = False


class SpeculativeOptions(BaseModel):
    """What one request may say about speculation. It never changes the answer."""

    model_config = ConfigDict(extra="forbid", strict=True)

    enabled: bool = True


class GenerationRequest(BaseModel):
    """What completions and chat completions share. A field that is null means its default."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
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
    prompt_logprobs: int | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    truncate_prompt_tokens: int | None = None
    cache_salt: str | None = None
    speculative_config: SpeculativeOptions | None = None
    per_request_spec_decode_metrics: SpecMetrics | None = None

    endpoint_names: ClassVar[frozenset[str]] = frozenset()
    """Fields that this endpoint maps to sampling itself."""

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def speculates(self) -> bool:
        """Whether drafts may be made for this request."""
        return self.speculative_config is None or self.speculative_config.enabled

    def sampling(self, **mapped: object) -> SamplingParams:
        """Return the sampling parameters; *mapped* are those whose fields this endpoint spells differently.

        Raises:
            InvalidRequestError: names the field, the value and the limit.
        """
        self._check()
        given = {
            name: getattr(self, name) for name in SAMPLING_NAMES & type(self).model_fields.keys() - self.endpoint_names
        }
        if self.seed is not None and -(SEED_MODULUS // 2) <= self.seed < 0:
            given["seed"] = self.seed % SEED_MODULUS
        chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(**(chosen | mapped))

    def _check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options is only for stream=true", "stream_options")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequestError(f"best_of is not supported, got {self.best_of}: use n", "best_of")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequestError("prompt_logprobs are not available with stream=true", "prompt_logprobs")
        if self.prompt_logprobs is not None and self.prompt_logprobs < 0:
            raise InvalidRequestError(
                f"prompt_logprobs must be at least 0, got {self.prompt_logprobs}", "prompt_logprobs"
            )


class CompletionRequest(GenerationRequest):
    """The body of `POST /v1/completions`."""

    prompt: Annotated[
        str | list[str] | list[int] | list[list[int]],
        PlainValidator(_checked_prompt, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ]
    echo: bool | None = None
    logprobs: int | None = None

    endpoint_names: ClassVar[frozenset[str]] = frozenset({"logprobs", "prompt_logprobs", "max_tokens"})

    @property
    def only_scores(self) -> bool:
        """Whether the prompt is echoed and nothing generated."""
        return bool(self.echo) and self.max_tokens == 0

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, one at least. Raises `InvalidRequestError`."""
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

    def completion_sampling(self) -> SamplingParams:
        """Return the sampling parameters; `echo` with `logprobs` asks for those of the prompt too."""
        if self.logprobs is not None and self.logprobs < 0:
            raise InvalidRequestError(f"logprobs must be at least 0, got {self.logprobs}", "logprobs")
        prompt_logprobs = self.prompt_logprobs
        if self.echo and self.logprobs is not None:
            prompt_logprobs = max(self.logprobs, prompt_logprobs or 0)
        mapped = {} if self.max_tokens is None else {"max_tokens": 1 if self.only_scores else self.max_tokens}
        return self.sampling(logprobs=self.logprobs, prompt_logprobs=prompt_logprobs, **mapped)


class ChatCompletionRequest(GenerationRequest):
    """The body of `POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    endpoint_names: ClassVar[frozenset[str]] = frozenset({"logprobs", "max_tokens"})

    @property
    def num_logprobs(self) -> int | None:
        """Candidates wanted beside each token, None for no log-probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def template_options(self) -> dict[str, bool]:
        """What the chat template is told."""
        given = {name: getattr(self, name) for name in ("add_generation_prompt", "continue_final_message")}
        return {name: value for name, value in given.items() if value is not None}

    def chat_sampling(self) -> SamplingParams:
        """Return the sampling parameters; without a limit, tokens up to the end of the context."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs=true", "top_logprobs")
        if self.top_logprobs is not None and self.top_logprobs < 0:
            raise InvalidRequestError(f"top_logprobs must be at least 0, got {self.top_logprobs}", "top_logprobs")
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self.sampling(logprobs=self.num_logprobs, max_tokens=limit)


def screen(body: Mapping[str, Any]) -> dict[str, Any]:
    """Drop fields that change nothing, refuse those that would change the answer.

    Raises:
        InvalidRequestError: names the field and its value.
    """
    for name, neutral in NEUTRAL.items():
        if name in body and body[name] not in neutral:
            raise InvalidRequestError(f"{name} is not supported, got {shown(body[name])}", name)
    return {name: value for name, value in body.items() if name not in HARMLESS and name not in NEUTRAL}
