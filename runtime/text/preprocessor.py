"""From what users ask to requests the engine can run: tokenised, checked against the model, seeds drawn.

Everything that can be wrong with a request is found here, before anything is scheduled.
"""

import random
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from protos.errors import InvalidRequestError
from protos.messages import Request, Sampling
from protos.sampling import SamplingParams
from protos.seeds import mix_seed
from protos.validation import did_you_mean, shown
from runtime.text.chat import render_chat
from runtime.text.grammar_validator import GrammarChecker
from runtime.text.special_tokens import Hidden, PlainSpecials
from runtime.text.tokenizer import Tokenizer, check_text, load_tokenizer

INTEGERS = frozenset({int, np.int32, np.int64})
PROMPT_KEYS = frozenset({"prompt", "prompt_token_ids", "cache_salt"})
MAX_TRUNCATED_CHARS = 4_000_000
"""Text to be truncated is tokenised whole, so its length is bounded by this and not by the context."""
MAX_DETOKENIZED = 1_000_000
"""Most token ids that are made text at a time."""


__all__ = ["Preprocessor", "Prompt", "as_prompts", "load_tokenizer", "render_chat"]


class Prompt(msgspec.Struct, frozen=True):
    """One prompt, tokenised and checked. `text` is None where token ids were given."""

    text: str | None
    token_ids: tuple[int, ...]
    cache_salt: str = ""


def as_prompts(prompts: object) -> list[Any]:
    """Return the single prompts in *prompts*: text, ids or a dict, or a list of any of these.

    Raises:
        InvalidRequestError: there is none, or it is something else.
    """
    if isinstance(prompts, str | Mapping | Prompt):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        return [prompts] if prompts.ndim == 1 else list(prompts)
    if not isinstance(prompts, list | tuple):
        raise InvalidRequestError(f"prompt must be text, token ids, or a list of them, got {shown(prompts)}", "prompt")
    if not prompts:
        raise InvalidRequestError("prompt must not be empty, got an empty list", "prompt")
    return [prompts] if isinstance(prompts[0], int) else list(prompts)


class Preprocessor:
    """Makes requests; owns the random seeds of requests that bring none.

    Args:
        tokenizer: None where only token ids go in and out.
        vocab_size: ids are from 0 to this, exclusive.
        max_model_len: prompt and output together, in tokens.
        capacity: tokens the whole KV cache holds.
        eos_ids: what ends a sequence, unless the request ignores it.
        seed: makes the drawn seeds repeatable.
        usual_tokens: how long an answer without `max_tokens` may get; None: up to the end of the context.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        max_model_len: int,
        capacity: int,
        eos_ids: Sequence[int] = (),
        seed: int | None = None,
        usual_tokens: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self._capacity = capacity
        self._eos_ids = tuple(eos_ids)
        self._random = random.Random(seed)
        self._usual_tokens = usual_tokens
        self._grammars = GrammarChecker(tokenizer, vocab_size, eos_ids)

    def requests(self, prompt: Any, params: SamplingParams, request_id: str) -> list[Request]:
        """Return one request for each of the `n` samples of *prompt*: text, ids, a dict, or a `Prompt`.

        Raises:
            InvalidRequestError: names the value and the limit; no request of the prompt exists.
        """
        known = prompt if isinstance(prompt, Prompt) else self.encode(prompt, params)
        max_tokens = self._max_tokens(len(known.token_ids), params)
        sampling = self._sampling(params)
        prediction = self._prediction(params.prediction)
        eos_ids = () if params.ignore_eos else self._eos_ids
        return [
            Request(
                request_id if params.n == 1 else f"{request_id}-{sample}",
                known.token_ids,
                params,
                _of_sample(sampling, sample),
                max_tokens,
                eos_ids,
                cache_salt=known.cache_salt,
                prediction_token_ids=prediction,
            )
            for sample in range(params.n)
        ]

    # Prompts

    def encode(self, prompt: Any, params: SamplingParams | None = None) -> Prompt:
        """Tokenise and check one prompt; *params* says how to truncate it, and how much room to leave."""
        params = params or SamplingParams()
        if isinstance(prompt, Mapping):
            return self._encode_dict(prompt, params)
        if isinstance(prompt, str):
            token_ids = self.tokenize(prompt, is_truncated=params.truncate_prompt_tokens is not None)
            return Prompt(prompt, self._fit(token_ids, params))
        return Prompt(None, self._fit(self._check_ids(prompt, "prompt"), params))

    def _encode_dict(self, prompt: Mapping[str, Any], params: SamplingParams) -> Prompt:
        given = {key: value for key, value in prompt.items() if value is not None}
        for key in given:
            if key not in PROMPT_KEYS:
                hint = did_you_mean(str(key), PROMPT_KEYS)
                raise InvalidRequestError(f"prompt has an unknown key {shown(key)}{hint}", "prompt")
        token_ids = given.get("prompt_token_ids")
        text = given.get("prompt")
        if token_ids is None and not isinstance(text, str):
            raise InvalidRequestError('prompt must have "prompt" (text) or "prompt_token_ids"', "prompt")
        made = self.encode(text if token_ids is None else list(token_ids), params)
        salt = str(given.get("cache_salt", ""))
        if salt:
            check_text(salt, "cache_salt")
        return Prompt(text if isinstance(text, str) else None, made.token_ids, salt)

    def tokenize(self, text: str, *, is_truncated: bool = False, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the ids of *text*, checked; raises `InvalidRequestError`."""
        if self.tokenizer is None:
            raise InvalidRequestError("prompt is text, but skip_tokenizer_init is set: pass token ids", "prompt")
        self._check_length(text, is_truncated=is_truncated)
        token_ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return self._check_ids(token_ids, "prompt")

    def _check_length(self, text: str, *, is_truncated: bool) -> None:
        """Refuse text that could not fit, before it is tokenised."""
        check_text(text)
        limit = MAX_TRUNCATED_CHARS if is_truncated else self.max_model_len * self._longest_token
        if len(text) > limit:
            raise InvalidRequestError(
                f"prompt has {len(text)} characters; {limit} is the most that fits the context of "
                f"{self.max_model_len} tokens",
                "prompt",
            )

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of *token_ids*, checked; special tokens as they are spelt."""
        if self.tokenizer is None:
            raise InvalidRequestError("skip_tokenizer_init is set: there is no text of token ids", "tokens")
        if len(token_ids) > MAX_DETOKENIZED:
            raise InvalidRequestError(f"tokens must be at most {MAX_DETOKENIZED}, got {len(token_ids)}", "tokens")
        return self.tokenizer.decode(self._check_ids(token_ids, "tokens"), skip_special_tokens=False)

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token: no text of more than this times the context can fit."""
        assert self.tokenizer is not None
        return max(map(len, self.tokenizer.get_vocab()))

    def _check_ids(self, token_ids: Any, param: str) -> tuple[int, ...]:
        """Return *token_ids* as a tuple of ints that the model has."""
        ids = token_ids.tolist() if isinstance(token_ids, np.ndarray) else token_ids
        if not isinstance(ids, list | tuple) or not INTEGERS.issuperset(map(type, ids)):
            raise InvalidRequestError(f"{param} must be a flat list of token ids, got {shown(token_ids)}", param)
        if not ids:
            raise InvalidRequestError(f"{param} must not be empty, got no tokens", param)
        low, high = min(ids), max(ids)
        if low < 0 or high >= self.vocab_size:
            wrong = shown(int(low if low < 0 else high))
            raise InvalidRequestError(f"{param} has token id {wrong}; ids are from 0 to {self.vocab_size - 1}", param)
        return tuple(map(int, ids))

    def _fit(self, token_ids: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
        keep = params.truncate_prompt_tokens
        if keep is None:
            return token_ids
        if keep == -1:
            keep = max(1, self.max_model_len - (params.max_tokens or 1))
        return token_ids[-keep:]

    def _prediction(self, prediction: str | tuple[int, ...] | None) -> tuple[int, ...]:
        """Return the ids of what the answer is expected to be, as many as there is room for."""
        if not prediction:
            return ()
        if not isinstance(prediction, str):
            return self._check_ids(prediction, "prediction")[: self.max_model_len]
        if self.tokenizer is None:
            raise InvalidRequestError("prediction is text, but skip_tokenizer_init is set: pass ids", "prediction")
        check_text(prediction, "prediction")
        text = prediction[: self.max_model_len * self._longest_token]
        return tuple(self.tokenizer.encode(text, add_special_tokens=False)[: self.max_model_len])

    # Room

    def _max_tokens(self, prompt_len: int, params: SamplingParams) -> int:
        """Return how many tokens to generate at most; refuse what can never fit."""
        # The last token is never fed, so it needs no place in the cache.
        limit = min(self.max_model_len, self._capacity + 1)
        what = (
            f"the context of {self.max_model_len}"
            if limit == self.max_model_len
            else (f"the KV cache of {self._capacity}")
        )
        if prompt_len >= limit:
            raise InvalidRequestError(
                f"prompt has {prompt_len} tokens, but {what} tokens must hold it and at least one of output; shorten "
                "the prompt or set truncate_prompt_tokens",
                "prompt",
            )
        room = limit - prompt_len
        wanted = params.min_tokens if params.max_tokens is None else params.max_tokens
        if wanted > room:
            name = "min_tokens" if params.max_tokens is None else "max_tokens"
            raise InvalidRequestError(
                f"{name} must be at most {room} with this prompt, got {wanted}: {what} tokens must hold the prompt's "
                f"{prompt_len} and the output",
                name,
            )
        usual = room if self._usual_tokens is None else min(room, max(self._usual_tokens, params.min_tokens))
        return params.max_tokens or usual

    # Sampling

    def _sampling(self, params: SamplingParams) -> Sampling:
        """Resolve *params* against the vocabulary."""
        stop_ids = self._known_ids(params.stop_token_ids, "stop_token_ids")
        bad_words = self._bad_words(params.bad_words)
        allowed = self._known_ids(params.allowed_token_ids or (), "allowed_token_ids") or None
        self._known_ids(tuple(params.logit_bias or ()), "logit_bias")
        if not params.ignore_eos:
            stop_ids = tuple(dict.fromkeys(stop_ids + self._eos_ids))
        if allowed is not None:
            _check_choice(allowed, bad_words, stop_ids if params.min_tokens else ())
        return Sampling(
            seed=self._random.getrandbits(64) if params.seed is None else params.seed,
            temperature=params.temperature,
            top_k=0 if params.top_k >= self.vocab_size else params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            logit_bias=dict(params.logit_bias) if params.logit_bias else None,
            allowed_ids=allowed,
            bad_words=bad_words,
            min_tokens=params.min_tokens,
            stop_ids=stop_ids,
            logprobs=self._count(params.logprobs),
            prompt_logprobs=self._count(params.prompt_logprobs),
            grammar=self._grammars.resolve(params.structured_outputs),
        )

    def _known_ids(self, token_ids: tuple[int, ...], param: str) -> tuple[int, ...]:
        return self._check_ids(token_ids, param) if token_ids else ()

    def _count(self, asked: int | None) -> int | None:
        """-1 is the whole vocabulary, which is also the most there is."""
        if asked is None:
            return None
        return self.vocab_size if asked == -1 else min(asked, self.vocab_size)

    def _bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences that spell *words*, at the start of a text and, where that differs, in it."""
        if words and self.tokenizer is None:
            raise InvalidRequestError("bad_words are text, but skip_tokenizer_init is set", "bad_words")
        return tuple(dict.fromkeys(spelling for word in words for spelling in self._spellings(word)))

    def _spellings(self, word: str) -> list[tuple[int, ...]]:
        bare, spaced = (self._word_ids(prefix + word.lstrip()) for prefix in ("", " "))
        # As in vLLM: the form behind a space counts where the space melts into the first token.
        melts = bare and spaced and len(spaced) == len(bare) and spaced[0] != bare[0]
        return [ids for ids in (bare, spaced if melts else ()) if ids]

    def _word_ids(self, text: str) -> tuple[int, ...]:
        assert self.tokenizer is not None
        return self._known_ids(tuple(self.tokenizer.encode(text, add_special_tokens=False)), "bad_words")

    # Chat

    def chat(self, messages: object, params: SamplingParams | None = None, **options: Any) -> Prompt:
        """Render *messages* by the chat template and tokenise the result; options as for `render_chat`."""
        if self.tokenizer is None:
            raise InvalidRequestError("messages are text, but skip_tokenizer_init is set: pass token ids", "messages")
        hidden = Hidden()
        marked = render_chat(self.tokenizer, messages, hide=lambda told: self._plain.hide(told, hidden), **options)
        text = hidden.restored(marked)
        params = params or SamplingParams()
        self._check_length(text, is_truncated=params.truncate_prompt_tokens is not None)
        # The template spells the special tokens itself.
        return Prompt(text, self._fit(self._check_ids(self._plain.encode(marked, hidden), "prompt"), params))

    @cached_property
    def _plain(self) -> PlainSpecials:
        assert self.tokenizer is not None
        return PlainSpecials(self.tokenizer)


def _of_sample(sampling: Sampling, sample: int) -> Sampling:
    """Sample 0 is the request itself; the others have seeds of their own, and leave prompt log-probabilities to it."""
    if sample == 0:
        return sampling
    return msgspec.structs.replace(sampling, seed=mix_seed(sampling.seed, sample), prompt_logprobs=None)


def _check_choice(allowed: tuple[int, ...], bad_words: tuple[tuple[int, ...], ...], stop_ids: tuple[int, ...]) -> None:
    """Some token must always be left to choose."""
    never = {word[0] for word in bad_words if len(word) == 1}.union(stop_ids)
    if never.issuperset(allowed):
        raise InvalidRequestError(
            f"allowed_token_ids leaves no token to choose: all {len(allowed)} are bad words, or stop tokens before "
            "min_tokens",
            "allowed_token_ids",
        )
