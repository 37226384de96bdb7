"""One engine of a check, with or without speculation, driven request by request."""

import gc
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from cluster.check.answers import Answer, AnswerBuilder, DraftCounts
from cluster.engine import make_engine
from protos.config.engine import EngineConfig
from protos.errors import SlipstreamError
from protos.messages import Request, TokenOutput
from protos.progress import ProgressCallback
from protos.sampling import SamplingParams
from runtime.text.prompts import Prompt

Floats = npt.NDArray[np.float64]
Ids = tuple[int, ...]
Tick = Callable[[], None]

LOGPROBS_BATCH = 16
"""Contexts whose log-probabilities are requested at once: each answer holds the whole vocabulary."""
LOGPROBS_PARAMS = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1, ignore_eos=True, detokenize=False)


@dataclass(frozen=True)
class RunJob:
    """One request: the prompt's token ids, how to sample, and the tenant whose caches it uses."""

    token_ids: Ids
    params: SamplingParams
    cache_salt: str = ""


class EngineRun:
    """An engine that lives for a `with` block.

    Args:
        config: the engine's configuration.
        report: called with a line for each stage of loading.

    Raises:
        ConfigError, ModelError, PlacementError: the engine cannot be built.
    """

    def __init__(self, config: EngineConfig, report: ProgressCallback) -> None:
        self._engine = make_engine(replace(config, model=replace(config.model, max_logprobs=-1)), report)
        self._num_requests = 0
        self.dtype = self._engine.info.dtype

    def __enter__(self) -> "EngineRun":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.shutdown()
        del self._engine
        gc.collect()  # models are part of reference cycles, and the next engine needs their memory
        torch.cuda.empty_cache()  # does nothing without a device

    @property
    def counts(self) -> DraftCounts:
        """Draft tokens proposed and accepted so far."""
        stats = self._engine.stats()
        return DraftCounts(stats.proposed, stats.accepted)

    @property
    def draft_failures(self) -> int:
        """Rounds so far in which drafting failed, so that they had no draft tokens."""
        return self._engine.stats().draft_failures

    def encode(self, prompts: Seq[Any], params: SamplingParams) -> list[Ids]:
        """Return the token ids of *prompts* (text, ids, or dictionaries of either); raises `InvalidRequestError`."""
        return [self._engine.preprocessor.encode(prompt, params).token_ids for prompt in prompts]

    def answers(self, jobs: Seq[RunJob], tick: Tick) -> list[Answer]:
        """Return the answers to *jobs*, in order; calls *tick* after each."""
        done: dict[str, Answer] = {}
        names = self._put(jobs, wants_steps=True)
        builders = {name: AnswerBuilder() for name in names}
        while len(done) < len(names):
            for output in self._engine.step():
                builders[output.request_id].add(output)
                if output.finish_reason is not None:
                    done[output.request_id] = builders[output.request_id].build(output.error or output.finish_reason)
                    tick()
        return [done[name] for name in names]

    def next_logprobs(self, contexts: Seq[Ids], tick: Tick) -> Iterator[Floats]:
        """Yield the log-probabilities of the raw logits after each of *contexts*, float64 `[V]`.

        Raises:
            SlipstreamError: the engine returned none.
        """
        for first in range(0, len(contexts), LOGPROBS_BATCH):
            batch = contexts[first : first + LOGPROBS_BATCH]
            names = self._put([RunJob(ids, LOGPROBS_PARAMS) for ids in batch], wants_steps=False)
            found: dict[str, Floats] = {}
            while len(found) < len(names):
                for output in self._engine.step():
                    found[output.request_id] = _logprobs(output)
                    tick()
            yield from (found[name] for name in names)

    def _put(self, jobs: Seq[RunJob], *, wants_steps: bool) -> list[str]:
        requests = [self._request(job, wants_steps) for job in jobs]
        self._engine.put(requests)
        return [request.request_id for request in requests]

    def _request(self, job: RunJob, wants_steps: bool) -> Request:
        name = str(self._num_requests)
        self._num_requests += 1
        (request,) = self._engine.preprocessor.requests(Prompt(None, job.token_ids, job.cache_salt), job.params, name)
        return msgspec.structs.replace(request, wants_steps=wants_steps)


def _logprobs(output: TokenOutput) -> Floats:
    if not output.logprobs:
        raise SlipstreamError(f"the engine returned no log-probabilities: {output.error or output.finish_reason}")
    top = output.logprobs[0]
    logprobs_V = np.empty(len(top.token_ids) - 1)  # the chosen token is listed twice
    logprobs_V[top.token_ids] = top.logprobs
    return logprobs_V
