"""From token outputs to messages of `slipstream.v1`."""

from collections.abc import Sequence
from dataclasses import asdict

from protos import slipstream_v1_pb2 as pb
from protos.messages import Request, SpeculationStats, Step, TokenLogprobs, TokenOutput
from protos.outputs import SpeculativeDecodingMetrics
from runtime.grpc.errors import StatusError
from runtime.http.render import TokenTexts
from runtime.http.schemas import SpecMetrics

FINISH_REASONS = {
    "stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH, "abort": pb.FINISH_REASON_ABORT,
}  # fmt: skip


class SampleWriter:
    """Writes one sample of a request: takes outputs, gives the messages that tell them.

    Args:
        index: which of the request's `n` samples.
        request: what is being answered.
        texts: the texts of tokens.
        streams: whether chunks are wanted.
        level: what the end tells of speculation.
    """

    def __init__(
        self, index: int, request: Request, texts: TokenTexts, *, streams: bool, level: SpecMetrics
    ) -> None:
        self._index = index
        self._request = request
        self._texts = texts
        self._streams = streams
        self._level = level
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._steps: list[Step] = []
        self._num_cached = 0

    def write(self, output: TokenOutput) -> list[pb.GenerateResponse]:
        """Return what *output* has clients told, at most a chunk and the end. Raises `StatusError` where it failed."""
        if output.error is not None:
            raise StatusError("INTERNAL", f"the request failed: {output.error}")
        self._add(output)
        written = []
        if self._streams and (output.token_ids or output.text or output.prompt_logprobs):
            written.append(pb.GenerateResponse(chunk=self._chunk(output)))
        if output.finish_reason is not None:
            written.append(pb.GenerateResponse(complete=self._complete(output)))
        return written

    def _add(self, output: TokenOutput) -> None:
        self._num_cached = max(self._num_cached, output.num_cached_tokens)
        self._text.append(output.text)
        self._token_ids += output.token_ids
        if output.step is not None and output.step.proposed:
            self._steps.append(output.step)
        if not self._streams:
            self._logprobs += output.logprobs or ()
            self._prompt_logprobs += output.prompt_logprobs or ()

    def _chunk(self, output: TokenOutput) -> pb.GenerateChunk:
        return pb.GenerateChunk(
            index=self._index,
            text=output.text,
            token_ids=output.token_ids,
            logprobs=self._positions(output.logprobs, self._request.sampling.logprobs),
            prompt_logprobs=self._positions(output.prompt_logprobs, self._request.sampling.prompt_logprobs),
        )

    def _complete(self, output: TokenOutput) -> pb.GenerateComplete:
        stats = output.speculation or SpeculationStats()
        reason = output.stop_reason
        return pb.GenerateComplete(
            index=self._index,
            text="".join(self._text),
            token_ids=self._token_ids,
            finish_reason=FINISH_REASONS.get(output.finish_reason or "", pb.FINISH_REASON_UNSPECIFIED),
            stop_string=reason if isinstance(reason, str) else None,
            stop_token_id=reason if isinstance(reason, int) else None,
            usage=self._usage(stats),
            logprobs=self._positions(self._logprobs, self._request.sampling.logprobs),
            prompt_logprobs=self._positions(self._prompt_logprobs, self._request.sampling.prompt_logprobs),
            speculative_decoding=self._statistics(stats),
        )

    def _usage(self, stats: SpeculationStats) -> pb.Usage:
        return pb.Usage(
            prompt_tokens=len(self._request.prompt_token_ids),
            completion_tokens=len(self._token_ids),
            cached_tokens=self._num_cached,
            spec_accepted_tokens=stats.accepted,
            spec_draft_tokens=stats.proposed,
        )

    def _positions(self, entries: Sequence[TokenLogprobs] | None, num_top: int | None) -> list[pb.PositionLogprobs]:
        if num_top is None:
            return []
        return [self._position(entry, 1 + num_top) for entry in entries or ()]

    def _position(self, entry: TokenLogprobs, num_told: int) -> pb.PositionLogprobs:
        rows = zip(entry.token_ids[:num_told], entry.logprobs, entry.ranks, strict=False)
        chosen, *top = [
            pb.TokenLogprob(token_id=token_id, logprob=logprob, rank=rank, text=self._texts[token_id])
            for token_id, logprob, rank in rows
        ]
        return pb.PositionLogprobs(chosen=chosen, top=top)

    def _statistics(self, stats: SpeculationStats) -> pb.SpeculativeDecodingMetrics | None:
        if self._level == "none":
            return None
        steps = self._steps if self._level == "detailed" else []
        return pb.SpeculativeDecodingMetrics(
            **asdict(SpeculativeDecodingMetrics.of(stats)),
            per_step_accepted=[step.accepted for step in steps],
            per_step_drafted=[step.proposed for step in steps],
        )
