"""Converts token outputs to messages of `slipstream.v1`."""

from collections.abc import Sequence
from dataclasses import asdict

from protos import slipstream_v1_pb2 as pb
from protos.errors import failure
from protos.messages import Request, SpeculationStats, Step, TokenLogprobs, TokenOutput
from protos.outputs import SpeculativeDecodingMetrics
from runtime.frontend.pacing import Pacing
from runtime.http.render import TokenTexts
from runtime.http.schemas import SpecMetrics

FINISH_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
}

PADDING_HEAD = 3
"""Bytes of the padding's field number and length, from `SHORTEST_PADDING` on."""
SHORTEST_PADDING = 128


class _SampleOutput:
    """Concatenated outputs of one sample."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def __bool__(self) -> bool:
        return bool(self.token_ids or self.prompt_logprobs or self.text)

    def add(self, output: TokenOutput) -> None:
        self._texts.append(output.text)
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or ()
        self.prompt_logprobs += output.prompt_logprobs or ()

    def join(self, later: "_SampleOutput", *, keeps_logprobs: bool) -> None:
        self._texts += later._texts
        self.token_ids += later.token_ids
        if keeps_logprobs:
            self.logprobs += later.logprobs
            self.prompt_logprobs += later.prompt_logprobs


class SampleWriter:
    """Writes the messages of one sample of a request.

    Args:
        index: which of the request's `n` samples.
        request: the request of this sample.
        texts: the texts of tokens.
        streams: whether to send chunks.
        level: detail of the speculation statistics at the end.
    """

    def __init__(self, index: int, request: Request, texts: TokenTexts, *, streams: bool, level: SpecMetrics) -> None:
        self._index = index
        self._request = request
        self._texts = texts
        self._streams = streams
        self._level = level
        self._all = _SampleOutput()
        self._new = _SampleOutput()
        self._steps: list[Step] = []
        self._num_cached = 0
        self._end: TokenOutput | None = None

    def add(self, output: TokenOutput) -> None:
        """Add the output of a step. Raises `SlipstreamError` if the request failed."""
        if output.error is not None:
            raise failure(output.error, output.retry_after_s)
        self._num_cached = max(self._num_cached, output.num_cached_tokens)
        if output.step is not None and output.step.proposed:
            self._steps.append(output.step)
        self._new.add(output)
        if output.finish_reason is not None:
            self._end = output

    def write(self) -> list[pb.GenerateResponse]:
        """Return the messages to send now: a chunk, the completion, both or neither."""
        messages = []
        if self._streams and self._new:
            messages.append(pb.GenerateResponse(chunk=self._chunk()))
        self._all.join(self._new, keeps_logprobs=not self._streams)
        self._new = _SampleOutput()
        if self._end is not None:
            messages.append(pb.GenerateResponse(complete=self._complete(self._end)))
        return messages

    def _chunk(self) -> pb.GenerateChunk:
        sampling = self._request.sampling
        return pb.GenerateChunk(
            index=self._index,
            text=self._new.text,
            token_ids=self._new.token_ids,
            logprobs=self._positions(self._new.logprobs, sampling.logprobs),
            prompt_logprobs=self._positions(self._new.prompt_logprobs, sampling.prompt_logprobs),
        )

    def _complete(self, end: TokenOutput) -> pb.GenerateComplete:
        stats, reason = end.speculation or SpeculationStats(), end.stop_reason
        sampling = self._request.sampling
        return pb.GenerateComplete(
            index=self._index,
            text=self._all.text,
            token_ids=self._all.token_ids,
            finish_reason=FINISH_REASONS.get(end.finish_reason or "", pb.FINISH_REASON_UNSPECIFIED),
            stop_string=reason if isinstance(reason, str) else None,
            stop_token_id=reason if isinstance(reason, int) else None,
            usage=self._usage(stats),
            logprobs=self._positions(self._all.logprobs, sampling.logprobs),
            prompt_logprobs=self._positions(self._all.prompt_logprobs, sampling.prompt_logprobs),
            speculative_decoding=self._statistics(stats),
        )

    def _usage(self, stats: SpeculationStats) -> pb.Usage:
        return pb.Usage(
            prompt_tokens=len(self._request.prompt_token_ids),
            completion_tokens=len(self._all.token_ids),
            cached_tokens=self._num_cached,
            spec_accepted_tokens=stats.accepted,
            spec_draft_tokens=stats.proposed,
        )

    def _positions(self, entries: Sequence[TokenLogprobs], num_top: int | None) -> list[pb.PositionLogprobs]:
        if num_top is None:
            return []
        return [self._position(entry, 1 + num_top) for entry in entries]

    def _position(self, entry: TokenLogprobs, num_candidates: int) -> pb.PositionLogprobs:
        rows = zip(entry.token_ids[:num_candidates], entry.logprobs, entry.ranks, strict=False)
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


def pad(messages: list[pb.GenerateResponse], pacing: Pacing) -> None:
    """Pad *messages*, which are sent together, to the size of whole packets, without the framing."""
    num_bytes = sum(message.ByteSize() for message in messages) + PADDING_HEAD
    room = pacing.padding(num_bytes)
    if room is None:
        return
    if room < SHORTEST_PADDING:  # one more packet
        room += 1 + (pacing.padding(num_bytes + room + 1) or 0)
    messages[-1].padding = bytes(room)
