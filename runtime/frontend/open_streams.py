"""The streams that are being read, and their requests."""

from collections import Counter
from collections.abc import Sequence

from protos.errors import DrainingError, InvalidRequestError, SlipstreamError, SlowReaderError
from protos.messages import Request, TokenOutput
from runtime.frontend.admission import Admission
from runtime.frontend.channel import Channel, Commands
from runtime.frontend.stream_queue import ReadingLimits, StreamQueue
from runtime.metrics.prometheus import Metrics


class OpenStreams:
    """Sends the requests of streams, distributes their outputs, and aborts requests without a reader.

    Belongs to one event loop.

    Args:
        channel: leads to the controller.
        admission: counts the requests that wait for their first token.
        reading: limits on slow readers.
        metrics: records requests and outputs, if given.
    """

    def __init__(self, channel: Channel, admission: Admission, reading: ReadingLimits, metrics: Metrics | None) -> None:
        self._channel = channel
        self._admission = admission
        self._reading = reading
        self._metrics = metrics
        self._streams: dict[str, StreamQueue] = {}  # by request id
        self._aborted: Counter[str] = Counter()  # by request id, how many last outputs are still to come
        self._has_ended = False

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, requests: Sequence[Request]) -> StreamQueue:
        """Send *requests* to the controller; return the queue of their outputs.

        Raises:
            OverloadedError: too many requests wait.
            InvalidRequestError: a request id is in use.
        """
        names = [request.request_id for request in requests]
        for name in names:
            if name in self._streams:
                raise InvalidRequestError(f"request_id {name!r} is already being answered", "request_id")
        self._admission.enter(requests)
        stream = StreamQueue({name: index for index, name in enumerate(names)}, self._reading)
        self._streams.update(dict.fromkeys(names, stream))
        if self._metrics:
            for request in requests:
                self._metrics.submitted(request)
        self._channel.send(Commands.start(requests))
        return stream

    def add(self, output: TokenOutput) -> None:
        """Add *output* to its stream; ignore it if the request was aborted. Fails a stream that is read too slowly."""
        if self._is_of_aborted(output):
            return
        stream = self._streams.get(output.request_id)
        if stream is None:
            return
        if self._metrics:
            self._metrics.received(output)
        if output.token_ids or output.finish_reason is not None:
            self._admission.start(output.request_id)
        if output.finish_reason is not None:
            del self._streams[output.request_id]
        try:
            stream.put(output)
        except SlowReaderError as error:
            self.fail(stream, error)

    def _is_of_aborted(self, output: TokenOutput) -> bool:
        """Whether *output* is of an aborted request, whose id another one may have by now. Those come first."""
        is_aborted = output.request_id in self._aborted
        if is_aborted and output.finish_reason is not None:
            self._aborted[output.request_id] -= 1
            if not self._aborted[output.request_id]:
                del self._aborted[output.request_id]
        return is_aborted

    def fail(self, stream: StreamQueue, error: SlipstreamError) -> None:
        """Abort the unfinished requests of *stream* now; its reader gets *error* after what is queued."""
        if self._metrics:
            self._metrics.turned_away(error)
        stream.fail(error)
        self.close(stream)

    def fail_all(self, error: SlipstreamError) -> None:
        """Abort every request now; every reader gets *error* after what is queued."""
        for stream in set(self._streams.values()):
            self.fail(stream, error)

    def close(self, stream: StreamQueue) -> None:
        """Abort the unfinished requests of *stream*."""
        names = [name for name in stream.open if self._streams.get(name) is stream]
        for name in names:
            del self._streams[name]
            self._admission.leave(name)
            if self._metrics:
                self._metrics.dropped(name, "abort")
        if names and not self._has_ended:
            self._aborted.update(names)
            self._channel.send(Commands(aborts=tuple(names)))

    def end(self, error: SlipstreamError) -> None:
        """Let every reader get *error* after what is queued. Nothing is sent to the controller afterwards."""
        self._has_ended = True
        if self._metrics:
            for name in self._streams:
                self._metrics.dropped(name, "abort" if isinstance(error, DrainingError) else "error")
        for stream in set(self._streams.values()):
            if self._metrics:
                self._metrics.turned_away(error)
            stream.fail(error)
