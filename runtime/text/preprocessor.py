"""Turns prompts and sampling parameters into `Request`s: tokenised, checked against the model, with seeds.

Invalid requests are refused here, before anything is scheduled.
"""

import random
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from protos.config.engine import MAX_LOGPROBS
from protos.errors import ContextLengthError, InvalidRequestError
from protos.messages import Request, Sampling
from protos.sampling import SamplingParams
from protos.seeds import MASK, mix, mix_seed
from protos.validation import shown
from runtime.text.chat import render_chat
from runtime.text.grammar_validator import GrammarChecker
from runtime.text.prompts import Prompt, check_prompt_dict
from runtime.text.special_tokens import SpecialTokenEscaper, SpecialTokenMarks
from runtime.text.token_options import bad_word_ids, check_allowed, check_number, num_logprobs, pack_ids
from runtime.text.tokenizer import Tokenizer

INTEGERS = frozenset({int, np.int32, np.int64})
MAX_TRUNCATED_CHARS = 4_000_000
"""Longest text to be truncated, in characters. It is tokenised whole, so the context does not bound its length."""
MAX_DETOKENIZED = 1_000_000
"""Most token ids per detokenization."""


class Preprocessor:
    """Makes requests.

    Args:
        tokenizer: None if prompts and outputs are token ids only.
        vocab_size: ids are from 0 to this, exclusive.
        max_model_len: limit on prompt and output together, in tokens.
        capacity: size of the KV cache, in tokens.
        eos_ids: end a sequence, unless the request ignores them.
        seed: makes the drawn seeds reproducible.
        mixes_seeds: see `EngineConfig`.
        default_max_tokens: limit of answers without `max_tokens`; None for the end of the context.
        max_logprobs: see `ModelConfig`.
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
        mixes_seeds: bool = False,
        default_max_tokens: int | None = None,
        max_logprobs: int = MAX_LOGPROBS,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self._capacity = capacity
        self._eos_ids = tuple(eos_ids)
        self._random, self._mixes_seeds = random.Random(seed), mixes_seeds
        self._default_max_tokens, self._max_logprobs = default_max_tokens, max_logprobs
        self.grammars = GrammarChecker(tokenizer, vocab_size, eos_ids)

    def requests(self, prompt: Any, params: SamplingParams, request_id: str) -> list[Request]:
        """Return one request for each of the `n` samples of *prompt*, which is text, ids, a dict, or a `Prompt`.

        Raises:
            InvalidRequestError: names the value and the limit.
        """
        encoded = prompt if isinstance(prompt, Prompt) else self.encode(prompt, params)
        max_tokens = self._max_tokens(len(encoded.token_ids), params)
        sampling = self._sampling(params)
        prediction = self._prediction(params.prediction)
        eos_ids = () if params.ignore_eos else self._eos_ids
        return [
            Request(
                request_id if params.n == 1 else f"{request_id}-{sample}",
                encoded.token_ids,
                params,
                _of_sample(sampling, sample),
                max_tokens,
                eos_ids,
                cache_salt=encoded.cache_salt,
                prediction_token_ids=prediction,
            )
            for sample in range(params.n)
        ]

    def encode(self, prompt: Any, params: SamplingParams | None = None, *, add_special_tokens: bool = True) -> Prompt:
        """Tokenise, check and truncate one prompt."""
        params = params or SamplingParams()
        if isinstance(prompt, Mapping):
            return self._encode_dict(prompt, params, add_special_tokens)
        if isinstance(prompt, str):
            is_truncated = params.truncate_prompt_tokens is not None
            token_ids = self.tokenize(prompt, is_truncated=is_truncated, add_special_tokens=add_special_tokens)
            return Prompt(prompt, self._fit(token_ids, params))
        return Prompt(None, self._fit(self.check_ids(prompt, "prompt"), params))

    def _encode_dict(self, prompt: Mapping[str, Any], params: SamplingParams, add_special_tokens: bool) -> Prompt:
        given = check_prompt_dict(prompt)
        text, token_ids, salt = given.get("prompt"), given.get("prompt_token_ids"), str(given.get("cache_salt", ""))
        content = text if token_ids is None else list(token_ids)
        encoded = self.encode(content, params, add_special_tokens=add_special_tokens)
        if salt:
            check_text(salt, "cache_salt")
        return Prompt(text if isinstance(text, str) else None, encoded.token_ids, salt)

    def tokenize(
        self, text: str, param: str = "prompt", *, is_truncated: bool = False, add_special_tokens: bool = True
    ) -> tuple[int, ...]:
        """Return the ids of *text*. Raises `InvalidRequestError`, with *param* as the name of what is wrong."""
        if self.tokenizer is None:
            raise InvalidRequestError(f"{param} is text, but skip_tokenizer_init is set: pass token ids", param)
        self._check_length(text, param, is_truncated=is_truncated)
        # What does not fit the model is refused below.
        token_ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        return self.check_ids(token_ids, param)

    def _check_length(self, text: str, param: str, *, is_truncated: bool) -> None:
        """Refuse text that cannot fit, before it is tokenised."""
        check_text(text, param)
        limit = MAX_TRUNCATED_CHARS if is_truncated else self.max_model_len * self._longest_token
        if len(text) > limit:
            raise ContextLengthError(
                f"{param} has {len(text)} characters; {limit} is the most that fits the context of "
                f"{self.max_model_len} tokens",
                param,
            )

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of *token_ids* with special tokens. Raises `InvalidRequestError`."""
        if self.tokenizer is None:
            raise InvalidRequestError("skip_tokenizer_init is set: there is no text of token ids", "tokens")
        if len(token_ids) > MAX_DETOKENIZED:
            raise InvalidRequestError(f"tokens must be at most {MAX_DETOKENIZED}, got {len(token_ids)}", "tokens")
        return self.tokenizer.decode(self.check_ids(token_ids, "tokens"), skip_special_tokens=False)

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token. Text longer than this times the context cannot fit."""
        assert self.tokenizer is not None
        return max(map(len, self.tokenizer.get_vocab()))

    def check_ids(self, token_ids: Any, param: str) -> tuple[int, ...]:
        """Return *token_ids* as a tuple of ints in the vocabulary. Raises `InvalidRequestError`."""
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
            keep = max(1, self.max_model_len - (params.max_tokens or max(1, params.min_tokens)))
        return token_ids[-keep:]

    def _seed(self, wanted: int | None) -> int:
        """Return the seed of a request that asks for *wanted*."""
        if wanted is not None and not self._mixes_seeds:
            return wanted
        drawn = self._random.getrandbits(64)
        return drawn if wanted is None else mix((wanted & MASK) ^ drawn)

    def _prediction(self, prediction: str | tuple[int, ...] | None) -> tuple[int, ...]:
        """Return the ids of the predicted output, truncated to the context."""
        if not prediction:
            return ()
        if not isinstance(prediction, str):
            return self.check_ids(prediction, "prediction")[: self.max_model_len]
        if self.tokenizer is None:
            raise InvalidRequestError("prediction is text, but skip_tokenizer_init is set: pass ids", "prediction")
        check_text(prediction, "prediction")
        text = prediction[: self.max_model_len * self._longest_token]
        return tuple(self.tokenizer.encode(text, add_special_tokens=False, verbose=False)[: self.max_model_len])

    def _max_tokens(self, prompt_len: int, params: SamplingParams) -> int:
        """Return the limit on generated tokens. Raises `InvalidRequestError` if the request can never fit."""
        # The last token is never fed, so it needs no slot in the cache.
        limit = min(self.max_model_len, self._capacity + 1)
        is_context = limit == self.max_model_len
        what = f"the context of {self.max_model_len}" if is_context else f"the KV cache of {self._capacity}"
        if prompt_len >= limit:
            raise ContextLengthError(
                f"prompt has {prompt_len} tokens, but {what} tokens must hold it and at least one of output; shorten "
                "the prompt or set truncate_prompt_tokens",
                "prompt",
            )
        room = limit - prompt_len
        wanted = params.min_tokens if params.max_tokens is None else params.max_tokens
        if wanted > room:
            name = "min_tokens" if params.max_tokens is None else "max_tokens"
            raise ContextLengthError(
                f"{name} must be at most {room} with this prompt, got {wanted}: {what} tokens must hold the prompt's "
                f"{prompt_len} and the output",
                name,
            )
        if params.max_tokens or self._default_max_tokens is None:
            return params.max_tokens or room
        return min(room, max(self._default_max_tokens, params.min_tokens))

    def _sampling(self, params: SamplingParams) -> Sampling:
        """Resolve *params* against the vocabulary."""
        structured = params.structured_outputs
        stop_ids = self._known_ids(params.stop_token_ids, "stop_token_ids")
        bad_words = bad_word_ids(params.bad_words, self.tokenizer) if params.bad_words else ()
        for word in bad_words:
            self.check_ids(word, "bad_words")
        if params.allowed_token_ids:
            check_number(params.allowed_token_ids, self.vocab_size)
        allowed = self._known_ids(params.allowed_token_ids or (), "allowed_token_ids") or None
        self._known_ids(tuple(params.logit_bias or ()), "logit_bias")
        if not params.ignore_eos:
            stop_ids = tuple(dict.fromkeys(stop_ids + self._eos_ids))
        if allowed is not None:
            check_allowed(allowed, bad_words, stop_ids if params.min_tokens else ())
        return Sampling(
            seed=self._seed(params.seed),
            temperature=params.temperature,
            top_k=0 if params.top_k >= self.vocab_size else params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            logit_bias=dict(params.logit_bias) if params.logit_bias else None,
            allowed_ids=None if allowed is None else pack_ids(allowed),
            bad_words=bad_words,
            min_tokens=params.min_tokens,
            stop_ids=stop_ids,
            logprobs=self._num_logprobs(params.logprobs, "logprobs"),
            prompt_logprobs=self._num_logprobs(params.prompt_logprobs, "prompt_logprobs"),
            grammar=self.grammars.resolve(structured) if structured else None,
        )

    def _known_ids(self, token_ids: tuple[int, ...], param: str) -> tuple[int, ...]:
        return self.check_ids(token_ids, param) if token_ids else ()

    def _num_logprobs(self, requested: int | None, param: str) -> int | None:
        return None if requested is None else num_logprobs(requested, self.vocab_size, self._max_logprobs, param)

    def chat(self, messages: object, params: SamplingParams | None = None, **options: Any) -> Prompt:
        """Render *messages* by the chat template and tokenise the result; options as for `render_chat`."""
        if self.tokenizer is None:
            raise InvalidRequestError("messages are text, but skip_tokenizer_init is set: pass token ids", "messages")
        marks = SpecialTokenMarks()
        marked = render_chat(
            self.tokenizer, messages, escape=lambda value: self._escaper.escape(value, marks), **options
        )
        text = marks.restore(marked)
        params = params or SamplingParams()
        self._check_length(text, "prompt", is_truncated=params.truncate_prompt_tokens is not None)
        # No special tokens are added: the template contains them.
        token_ids = self.check_ids(self._escaper.encode(marked, marks), "prompt")
        return Prompt(text, self._fit(token_ids, params))

    @cached_property
    def _escaper(self) -> SpecialTokenEscaper:
        assert self.tokenizer is not None
        return SpecialTokenEscaper(self.tokenizer)


def _of_sample(sampling: Sampling, sample: int) -> Sampling:
    """Return the sampling of one of `n` samples: sample 0 is unchanged, the others get seeds and no prompt logprobs."""
    if sample == 0:
        return sampling
    return msgspec.structs.replace(sampling, seed=mix_seed(sampling.seed, sample), prompt_logprobs=None)


def check_text(text: str, param: str = "prompt") -> None:
    """Raise `InvalidRequestError` for text that is empty or cannot be encoded."""
    if not text:
        raise InvalidRequestError(f"{param} must not be empty", param)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{param} has a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}; it is not text",
            param,
        ) from None
