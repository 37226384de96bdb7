"""The response bodies of the HTTP server. Fields that are `UNSET` are left out."""

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType


class PromptDetails(msgspec.Struct, frozen=True):
    """Prompt tokens that were in the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Token counts of a whole response; a prompt counts once for all its samples."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class SpeculativeDecoding(msgspec.Struct, frozen=True):
    """Acceptance statistics over all choices, under vLLM's names; see `SpeculativeDecodingMetrics` for most of them.

    `acceptance_histogram_by_draft_length` has a row for each draft length; index j counts the steps that accepted
    exactly j tokens. `per_step_accepted` and `per_step_drafted` have an entry for each step with a draft, choice by
    choice.
    """

    mean_acceptance_length: float | None
    draft_acceptance_rate: float | None
    acceptance_histogram: list[int]
    acceptance_per_position: list[float]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    acceptance_histogram_by_draft_length: dict[str, list[int]]
    per_step_accepted: list[int] | UnsetType = UNSET
    per_step_drafted: list[int] | UnsetType = UNSET


Origin = Literal["accepted", "correction", "bonus", "plain"]


class TokenOrigin(msgspec.Struct, frozen=True):
    """One token and its origin.

    `accepted`: a draft token. `correction`: sampled by the target in place of a rejected draft token. `bonus`: sampled
    after a fully accepted draft. `plain`: sampled without a draft. `text` is decoded alone: part of a character is
    U+FFFD, and tokenizers may drop a space before a word.
    """

    text: str
    origin: Origin


class StepOrigins(msgspec.Struct, frozen=True):
    """The tokens of one step of the choice `index`.

    `step` counts the choice's steps from 1. `drafted` tokens were proposed, on paths of at most `depth` tokens, and
    `accepted` of them were accepted.
    """

    index: int
    step: int
    drafted: int
    depth: int
    accepted: int
    tokens: list[TokenOrigin]


class ResponseMetrics(msgspec.Struct, frozen=True):
    """Per-request statistics, and the origins of the tokens of this response or chunk."""

    speculative_decoding: SpeculativeDecoding | UnsetType = UNSET
    token_origins: list[StepOrigins] | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of a text completion, one entry per token; null for the first token of the prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, frozen=True):
    """One candidate at a prompt position."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChoice(msgspec.Struct, frozen=True):
    """One choice, or the part of it in a chunk. The first chunk has the prompt's ids."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True):
    """The response of `POST /v1/completions`, and each chunk of its stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: Usage | UnsetType | None = UNSET
    metrics: ResponseMetrics | UnsetType = UNSET


class TopLogprob(msgspec.Struct, frozen=True):
    """One candidate of a chat token."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    """A chat token and its candidates."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of a chat answer, one entry per token."""

    content: list[ChatTokenLogprob]


class FunctionCall(msgspec.Struct, frozen=True):
    """A function to call; `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    """One call of the answer."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class FunctionDelta(msgspec.Struct, frozen=True):
    """The part of a call in a chunk; the first part has the name."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, frozen=True):
    """The part in a chunk of the call at `index`; the first part has an id."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatMessage(msgspec.Struct, frozen=True):
    """The answer: text, calls, or both."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True):
    """The part of an answer in a chunk; the first chunk of a choice has the role."""

    content: str | UnsetType
    role: Literal["assistant"] | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """The part of one choice in a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True):
    """The response of `POST /v1/chat/completions`. `prompt_logprobs` are those of each choice, as in vLLM."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    object: Literal["chat.completion"] = "chat.completion"
    usage: Usage | UnsetType | None = UNSET
    metrics: ResponseMetrics | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, frozen=True):
    """One chunk of a streamed chat completion. The first ones of the choices have the prompt's ids."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET
    metrics: ResponseMetrics | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class ModelCard(msgspec.Struct, frozen=True):
    """One served name."""

    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "slipstream"


class ModelList(msgspec.Struct, frozen=True):
    """The response of `GET /v1/models`."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class Tokenized(msgspec.Struct, frozen=True):
    """The response of `POST /tokenize`; `token_strs` are the vocabulary's strings."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, frozen=True):
    """The response of `POST /detokenize`."""

    prompt: str
