"""`SamplingParams`: what a user may ask of one request, under vLLM's names."""

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from protos.errors import InvalidRequestError
from protos.structured import StructuredOutputsParams
from protos.validation import request_error, shown, typed

MAX_N = 128
MAX_LOGPROBS = 20
MAX_COUNT = 2**31 - 1
GREEDY_BELOW = 1e-5

# vLLM's arguments that change nothing here: what they steer does not exist, or is always so.
HARMLESS = frozenset(
    {
        "output_kind",
        "skip_clone",
        "flat_logprobs",
        "early_stopping",
        "length_penalty",
        "skip_reading_prefix_cache",
    }
)
# vLLM's arguments that would change the tokens; refused unless they are left at "nothing asked".
REFUSED = {
    "best_of": "use n",
    "use_beam_search": "beam search is not available",
    "guided_decoding": "use structured_outputs",
    "logits_processors": "use logit_bias, bad_words or allowed_token_ids",
    "extra_args": "no extra arguments are known",
    "repetition_detection": "use the penalties or stop strings",
    "thinking_token_budget": "use max_tokens",
    "logprob_token_ids": "use logprobs",
}


def _as_tuple(value: object) -> object:
    """Let None be empty and one string be a list of one."""
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else value


def _off_is_zero(value: object) -> object:
    return 0 if value is None or (isinstance(value, int) and value == -1) else value


def _greedy_is_zero(value: float) -> float:
    """As in vLLM, temperatures too small to divide by mean greedy."""
    return 0.0 if value < GREEDY_BELOW else value


TokenId = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Text = Annotated[str, Field(min_length=1, max_length=1024)]
Temperature = Annotated[float, Field(ge=0.0, le=100.0), AfterValidator(_greedy_is_zero)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]


def _without_foreign(given: dict[str, Any]) -> dict[str, Any]:
    """Drop vLLM's arguments that mean nothing here; refuse those that would change the tokens."""
    for name, instead in REFUSED.items():
        if given.get(name) not in (None, False, (), [], {}):
            raise InvalidRequestError(f"{name} is not supported, got {shown(given[name])}: {instead}", name)
    form = given.get("structured_outputs")
    if isinstance(form, dict):
        given = {**given, "structured_outputs": StructuredOutputsParams(**form)}
    return {name: value for name, value in given.items() if name not in HARMLESS and name not in REFUSED}


@typed(request_error, _without_foreign)
@dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class SamplingParams:
    """Sampling options of one request, under vLLM's names; all are checked here.

    Sequences may be lists, one string, or None for none; they are kept as tuples. `top_k` -1 and 0 mean off,
    `temperature` 0 (and below 1e-5) greedy. `seed` is a uint64; without one the request gets a random one.
    `max_tokens` None means up to the end of the context. `logprobs` and `prompt_logprobs` count the most likely tokens
    told beside the chosen one, -1 for the whole vocabulary. `truncate_prompt_tokens` keeps the prompt's last
    tokens, -1 as many as fit. `prediction` is what the answer is expected to be, text or token ids: where speculation
    looks things up (`ngram`, `suffix`), it is looked up there first; it changes no token. `structured_outputs`, or a
    dictionary of its fields, says what form the answer must have. To change one of all these,
    `dataclasses.replace(params, temperature=0.0)`.

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
    seed: int | None = Field(default=None, ge=0, le=2**64 - 1)
    stop: Annotated[tuple[Text, ...], BeforeValidator(_as_tuple), Field(max_length=64)] = ()
    stop_token_ids: Annotated[tuple[TokenId, ...], BeforeValidator(_as_tuple), Field(max_length=1024)] = ()
    bad_words: Annotated[tuple[Text, ...], BeforeValidator(_as_tuple), Field(max_length=256)] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = Field(default=16, ge=1, le=MAX_COUNT)
    min_tokens: int = Field(default=0, ge=0, le=MAX_COUNT)
    logprobs: int | None = Field(default=None, ge=-1, le=MAX_LOGPROBS)
    prompt_logprobs: int | None = Field(default=None, ge=-1, le=MAX_LOGPROBS)
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, le=MAX_COUNT)
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=1024)] | None = None
    allowed_token_ids: Annotated[tuple[TokenId, ...], Field(min_length=1)] | None = None
    prediction: str | tuple[TokenId, ...] | None = None
    structured_outputs: StructuredOutputsParams | None = None

    @model_validator(mode="after")
    def _agree(self) -> "SamplingParams":
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")
        if self.stop and not self.detokenize:
            raise ValueError("stop strings are looked for in the text: they need detokenize=True")
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens must be at least 1, or -1 for as many as fit, got 0")
        return self
