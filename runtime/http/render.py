"""Response fields made from token outputs: token texts, log-probabilities, usage and statistics."""

import codecs
import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import Protocol

from msgspec import UNSET

from protos.byte_level import token_bytes
from protos.messages import Request, SpeculationStats, Step, TokenLogprobs
from protos.outputs import SpeculativeDecodingMetrics, total
from protos.sampling import SamplingParams
from runtime.http.responses import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptDetails,
    PromptLogprob,
    PromptLogprobs,
    ResponseMetrics,
    SpeculativeDecoding,
    TopLogprob,
    Usage,
)
from runtime.text.pieces import BYTE, REPLACEMENT, Utf8

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot represent."""


class Decoder(Protocol):
    """The part of a tokenizer that is used here."""

    def decode(self, ids: Sequence[int], /, *, skip_special_tokens: bool = False) -> str:
        """Return the text of *ids*."""
        ...

    def convert_ids_to_tokens(self, ids: list[int], /) -> list[str]:
        """Return the vocabulary's strings of *ids*."""
        ...


class TokenTexts(dict[int, str]):
    """Cache of the texts of single tokens, including special tokens."""

    def __init__(self, tokenizer: Decoder) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._special: set[int] = set()

    def __missing__(self, token_id: int) -> str:
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        # Decoders for sentencepiece drop the leading space of a text; decode the token twice to find it.
        twice = self._tokenizer.decode([token_id, token_id], skip_special_tokens=True)
        if twice == f"{text} {text}":
            text = f" {text}"
        elif not twice:
            self._special.add(token_id)
        self[token_id] = text
        return text

    def decode(self, token_ids: Sequence[int], params: SamplingParams) -> str:
        """Return the text of *token_ids*, with or without special tokens as in *params*."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=params.skip_special_tokens)

    def is_special(self, token_id: int) -> bool:
        """Whether texts without special tokens lack this one."""
        return bool(self[token_id]) and token_id in self._special

    def bytes_of(self, token_id: int) -> list[int]:
        """Return the UTF-8 of a token; of one that is part of a character, its bytes."""
        if REPLACEMENT not in (text := self[token_id]):
            return list(text.encode())
        (token,) = self.token_strs([token_id])
        byte = BYTE.fullmatch(token)
        return list(token_bytes(token)) if byte is None else [int(byte[1], 16)]

    def token_strs(self, token_ids: Sequence[int]) -> list[str]:
        """Return the vocabulary's strings of *token_ids*; empty for ids it lacks."""
        return [token or "" for token in self._tokenizer.convert_ids_to_tokens(list(token_ids))]


def finite(logprob: float) -> float:
    """Return *logprob*, or `LOWEST` if JSON cannot represent it."""
    return logprob if math.isfinite(logprob) else LOWEST


class LogprobsWriter:
    """Formats the log-probabilities of one choice, chunk by chunk. Keeps the text offset.

    Args:
        texts: the texts of tokens.
        num_top: number of candidates per token.
        skips_special: whether the text of the answer has no special tokens.
    """

    def __init__(self, texts: TokenTexts, num_top: int, *, skips_special: bool = True) -> None:
        self._texts = texts
        self._num_top = num_top
        self._skips_special = skips_special
        self._offset = 0
        self._utf8 = Utf8("replace")

    def completion(
        self, entries: Sequence[TokenLogprobs], prompt_ids: Sequence[int] = (), echoed: str = ""
    ) -> CompletionLogprobs:
        """Return *entries* in the completion format.

        They begin with those of *prompt_ids*, if there are any, whose text is *echoed*. The first token of a prompt has
        no log-probability.
        """
        head = list(prompt_ids[:1])
        ids = head + [entry.token_ids[0] for entry in entries]
        placed = self._in_prompt(prompt_ids, echoed) if prompt_ids else []
        return CompletionLogprobs(
            [self._texts[token_id] for token_id in ids],
            [None] * len(head) + [finite(entry.logprobs[0]) for entry in entries],
            [None] * len(head) + [self._top(entry) for entry in entries],
            placed + self._in_answer(ids[len(prompt_ids) :]),
        )

    def _in_prompt(self, ids: Sequence[int], echoed: str) -> list[int]:
        """Return where the tokens of a prompt begin. What the tokenizer puts before the text begins with it."""
        utf8, texts = Utf8("replace"), self._texts
        left_out = {i for i in set(ids) if texts.is_special(i) and texts[i] not in echoed}
        sizes = [0 if i in left_out else self._size(i, utf8) for i in ids]
        self._offset = len(echoed)
        begin = len(echoed) - sum(sizes)
        return [max(0, offset) for offset in accumulate(sizes[:-1], initial=begin)]

    def _in_answer(self, ids: Sequence[int]) -> list[int]:
        sizes = [0 if self._skips_special and self._texts.is_special(i) else self._size(i, self._utf8) for i in ids]
        *offsets, self._offset = accumulate(sizes, initial=self._offset)
        return offsets

    def _size(self, token_id: int, utf8: codecs.IncrementalDecoder) -> int:
        """Return how many characters end with a token; all but the last byte of a character end none."""
        return len(utf8.decode(bytes(self._texts.bytes_of(token_id))))

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """Return the best `num_top` tokens and the sampled one; of tokens with equal text, the likelier."""
        last = 1 + self._num_top
        best: dict[str, float] = {}
        pairs = [*zip(entry.token_ids[1:last], entry.logprobs[1:last], strict=True)]
        for token_id, logprob in [*pairs, (entry.token_ids[0], entry.logprobs[0])]:
            best.setdefault(self._texts[token_id], finite(logprob))
        return best


def chat_logprobs(entries: Sequence[TokenLogprobs], texts: TokenTexts, num_top: int) -> ChatLogprobs:
    """Return *entries* in the chat format: each token with its *num_top* best candidates."""
    return ChatLogprobs([_chat_token(entry, texts, num_top) for entry in entries])


def _chat_token(entry: TokenLogprobs, texts: TokenTexts, num_top: int) -> ChatTokenLogprob:
    sampled, *tops = [
        TopLogprob(texts[token_id], finite(value), texts.bytes_of(token_id))
        for token_id, value in zip(entry.token_ids[: 1 + num_top], entry.logprobs, strict=False)
    ]
    return ChatTokenLogprob(sampled.token, sampled.logprob, sampled.bytes, tops)


def prompt_logprobs(entries: Sequence[TokenLogprobs], texts: TokenTexts) -> PromptLogprobs:
    """Return *entries* in vLLM's format: null for the first token, then candidates by id."""
    return [None, *({str(i): candidate for i, candidate in _candidates(entry, texts)} for entry in entries)]


def _candidates(entry: TokenLogprobs, texts: TokenTexts) -> list[tuple[int, PromptLogprob]]:
    return [
        (token_id, PromptLogprob(finite(logprob), rank, texts[token_id]))
        for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, entry.ranks, strict=True)
    ]


def usage(groups: Sequence[Sequence[Request]], num_generated: int, num_cached: int) -> Usage:
    """Count tokens; the requests of a group are samples of one prompt."""
    num_prompt = sum(len(group[0].prompt_token_ids) for group in groups)
    return Usage(num_prompt, num_generated, num_prompt + num_generated, PromptDetails(num_cached))


def speculation(
    stats: Sequence[SpeculationStats | None], steps: Sequence[Step], *, is_detailed: bool
) -> ResponseMetrics:
    """Return the statistics over all choices; *steps* are their steps with a draft."""
    metrics = SpeculativeDecodingMetrics.of(total(stats))
    return ResponseMetrics(
        SpeculativeDecoding(
            **asdict(metrics),
            acceptance_histogram_by_draft_length=_by_length(steps),
            per_step_accepted=[step.accepted for step in steps] if is_detailed else UNSET,
            per_step_drafted=[step.proposed for step in steps] if is_detailed else UNSET,
        )
    )


def _by_length(steps: Sequence[Step]) -> dict[str, list[int]]:
    rows: dict[int, list[int]] = {}
    for step in steps:
        rows.setdefault(step.depth, [0] * (step.depth + 1))[step.accepted] += 1
    return {str(length): rows[length] for length in sorted(rows)}
