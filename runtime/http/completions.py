"""`POST /v1/completions`."""

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from protos.messages import Request, TokenOutput
from runtime.http.context import RouteContext
from runtime.http.job import Choice, CompletionJob, Envelope
from runtime.http.render import LogprobsWriter, TokenTexts, prompt_logprobs
from runtime.http.responses import Completion, CompletionChoice, CompletionLogprobs, ResponseMetrics, Usage
from runtime.http.schemas import CompletionRequest


@dataclass(frozen=True)
class CompletionEnvelope(Envelope):
    """The fields that a completion and all its chunks share."""

    id: str
    created: int
    model: str

    def wrap(
        self,
        choices: list[Any],
        usage: Usage | UnsetType | None = UNSET,
        metrics: ResponseMetrics | UnsetType = UNSET,
    ) -> msgspec.Struct:
        """See `Envelope`."""
        return Completion(self.id, self.created, self.model, choices, usage=usage, metrics=metrics)


class CompletionWriter(Choice):
    """One choice of a completion.

    Args:
        index: its number among the choices.
        request: the request of this choice.
        body: the HTTP request.
        texts: the texts of tokens.
        echoed: the prompt's text if it is echoed, else empty.
    """

    def __init__(self, index: int, request: Request, body: CompletionRequest, texts: TokenTexts, echoed: str) -> None:
        super().__init__(index)
        self._request = request
        self._body = body
        self._texts = texts
        self._echo: str | None = echoed if body.echo else None
        self._prompt_ids = request.prompt_token_ids if body.return_token_ids else UNSET
        skips = request.params.skip_special_tokens
        self._logprobs = None if body.logprobs is None else LogprobsWriter(texts, body.logprobs, skips_special=skips)

    def add(self, output: TokenOutput) -> None:
        """Add the output of a step; without its token if the request only scores its prompt."""
        if self._body.only_scores:
            output = msgspec.structs.replace(output, token_ids=(), text="", logprobs=None, stop_reason=None)
            if output.finish_reason is not None:
                output = msgspec.structs.replace(output, finish_reason="length")
        super().add(output)

    def render(self) -> CompletionChoice:
        """See `Choice`."""
        logprobs = self._pending_logprobs()
        text = (self._echo or "") + self.text
        self._echo = None
        shown = UNSET if self._body.prompt_logprobs is None else prompt_logprobs(self.prompt_logprobs, self._texts)
        prompt_ids, self._prompt_ids = self._prompt_ids, UNSET
        ids = self.token_ids if self._body.return_token_ids else UNSET
        return CompletionChoice(
            self.index, text, logprobs, self.finish_reason, self.stop_reason, shown, prompt_ids, ids
        )

    def _pending_logprobs(self) -> CompletionLogprobs | None:
        if self._logprobs is None:
            return None
        if self._echo is None:
            return self._logprobs.completion(self.logprobs)
        entries = [*self.prompt_logprobs, *self.logprobs]
        return self._logprobs.completion(entries, self._request.prompt_token_ids, self._echo)


async def completion_job(context: RouteContext, body: CompletionRequest) -> CompletionJob:
    """Validate *body*; nothing is scheduled yet.

    Raises:
        InvalidRequestError: names the field, the value and the limit.
        ApiError: the model is not served.
    """
    model = context.model_name(body.model)
    request_id = f"cmpl-{uuid.uuid4().hex}"
    prompts = body.prompts()
    with body.structured_as_sent():
        params = body.completion_sampling(context.options.sampling_defaults)
    context.engine.check_open(len(prompts) * params.n)  # before any of them is tokenised
    groups: list[list[Request]] = []
    choices: list[Choice] = []
    for index, prompt in enumerate(prompts):
        name = request_id if len(prompts) == 1 else f"{request_id}-{index}"
        content: Sequence[int] | str = prompt
        if prompt and isinstance(prompt, str) and body.add_special_tokens is False:
            is_truncated = params.truncate_prompt_tokens is not None
            content = await context.engine.tokenize(prompt, add_special_tokens=False, is_truncated=is_truncated)
        with body.structured_as_sent():
            groups.append(context.with_options(await context.engine.prepare(content, params, name), body))
        echoed = _echoed(prompt, groups[-1][0], context.texts) if body.echo else ""
        choices += [
            CompletionWriter(len(choices) + j, each, body, context.texts, echoed) for j, each in enumerate(groups[-1])
        ]
        await asyncio.sleep(0)  # let other requests' tokens through while a large batch is prepared
    envelope = CompletionEnvelope(request_id, int(time.time()), model)
    spec_metrics, origins = context.spec_metrics(body), context.origins(body)
    return CompletionJob(groups, choices, envelope, body.stream_usage, spec_metrics, origins)


def _echoed(prompt: str | list[int], request: Request, texts: TokenTexts) -> str:
    """Return the prompt's text as given, or decoded if it was given as tokens or truncated."""
    if isinstance(prompt, str) and request.params.truncate_prompt_tokens is None:
        return prompt
    return texts.decode(request.prompt_token_ids, request.params)
