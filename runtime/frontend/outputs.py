"""Collects the outputs of steps into `RequestOutput`s."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from protos.messages import Request, SpeculationStats, TokenLogprobs, TokenOutput
from protos.outputs import (
    CompletionOutput,
    Logprob,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
    SpeculativeDecodingMetrics,
    total,
)

Decode = Callable[[int], str | None]
"""Returns the text of one token id, None if there is no tokenizer."""


def no_text(token_id: int) -> None:
    """The `Decode` of engines without a tokenizer."""


def decoder(tokenizer: Any) -> Decode:
    """Return a cached function from token id to text: log-probabilities repeat the same tokens."""
    if tokenizer is None:
        return no_text
    return functools.lru_cache(maxsize=65536)(lambda token_id: str(tokenizer.decode([token_id])))


def position_logprobs(entry: TokenLogprobs, decode: Decode) -> PositionLogprobs:
    """Return *entry* in the public format, the sampled token first."""
    rows = zip(entry.token_ids, entry.logprobs, entry.ranks, strict=True)
    return {token_id: Logprob(logprob, rank, decode(token_id)) for token_id, logprob, rank in rows}


class OutputCollector:
    """Collects the outputs of one prompt's requests, one for each of its `n` samples, into a `RequestOutput`.

    Args:
        request_id: the id of the prompt; *requests* have the ids of the samples.
        prompt: the prompt's text, if it was given as text.
        requests: the samples in order, all with the same prompt and parameters.
        decode: the text of one token, for log-probabilities.
    """

    def __init__(
        self, request_id: str, prompt: str | None, requests: Sequence[Request], decode: Decode = no_text
    ) -> None:
        self._request_id = request_id
        self._prompt = prompt
        self._prompt_token_ids = list(requests[0].prompt_token_ids)
        self._decode = decode
        self._indices = {request.request_id: index for index, request in enumerate(requests)}
        self._outputs = [CompletionOutput(index) for index in range(len(requests))]
        self._texts: list[list[str]] = [[] for _ in requests]
        self._stats: list[SpeculationStats | None] = [None] * len(requests)
        self._num_cached, self._num_unfinished = 0, len(requests)
        self._metrics = RequestMetrics(arrival_time=time.time())
        sampling = requests[0].sampling
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None
        if sampling.prompt_logprobs is not None:
            self._prompt_logprobs = [None]
        if sampling.logprobs is not None:
            for output in self._outputs:
                output.logprobs, output.cumulative_logprob = [], 0.0

    @property
    def finished(self) -> bool:
        """Whether every sample has ended."""
        return self._num_unfinished == 0

    @property
    def num_tokens(self) -> int:
        """Output tokens so far, over all samples."""
        return self._metrics.num_generation_tokens

    def add(self, new: TokenOutput) -> None:
        """Add the output of a step to its sample."""
        index = self._indices[new.request_id]
        output = self._outputs[index]
        output.token_ids.extend(new.token_ids)
        if new.text:
            self._texts[index].append(new.text)
        self._count(len(new.token_ids))
        if new.logprobs or new.prompt_logprobs:
            self._add_logprobs(output, new)
        if index == 0 and new.num_cached_tokens > self._num_cached:
            self._num_cached = new.num_cached_tokens
        if new.finish_reason is not None:
            self._finish(output, new)

    def _count(self, num_tokens: int) -> None:
        if num_tokens and self._metrics.first_token_time is None:
            self._metrics.first_token_time = time.time()
        self._metrics.num_generation_tokens += num_tokens

    def _add_logprobs(self, output: CompletionOutput, new: TokenOutput) -> None:
        if new.logprobs and output.logprobs is not None:
            output.logprobs.extend(position_logprobs(entry, self._decode) for entry in new.logprobs)
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + sum(e.logprobs[0] for e in new.logprobs)
        if new.prompt_logprobs and self._prompt_logprobs is not None and output.index == 0:
            self._prompt_logprobs.extend(position_logprobs(entry, self._decode) for entry in new.prompt_logprobs)

    def _finish(self, output: CompletionOutput, new: TokenOutput) -> None:
        self._num_unfinished -= output.finish_reason is None
        output.finish_reason = new.finish_reason
        output.stop_reason = new.stop_reason if new.error is None else new.error
        self._stats[output.index] = new.speculation
        if new.speculation is not None:
            output.speculation = SpeculativeDecodingMetrics.of(new.speculation)
        if self.finished:
            self._metrics.finished_time = time.time()
            self._metrics.speculative_decoding = SpeculativeDecodingMetrics.of(total(self._stats))

    def result(self) -> RequestOutput:
        """Return the outputs so far. Later results share its lists."""
        for output, pieces in zip(self._outputs, self._texts, strict=True):
            output.text = "".join(pieces)
        return RequestOutput(
            self._request_id,
            self._prompt,
            self._prompt_token_ids,
            self._prompt_logprobs,
            self._outputs,
            self.finished,
            self._metrics,
            self._num_cached,
        )
