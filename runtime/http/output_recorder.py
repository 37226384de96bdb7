"""Logs the answers to requests that asked for it: `slipstream serve --output-log`."""

import logging
from collections.abc import Sequence

from protos.messages import Request
from runtime.frontend.stream_queue import Delta
from runtime.text.output_log import AnswerRecorder, OutputLog, logged_sampling

log = logging.getLogger("slipstream")

HEADER = "x-slipstream-log-output"
"""A request with this header set to 1 or true is logged, if the server has a log."""


class OutputRecorder:
    """Collects the answers of one HTTP request, and logs each when it has ended without an error.

    Args:
        opened: the log.
        model: the target's Hub id or folder.
        requests: of the choices, in order.
    """

    def __init__(self, opened: OutputLog, model: str, requests: Sequence[Request]) -> None:
        self._log, self._model, self._requests = opened, model, requests
        self._answers = [AnswerRecorder() for _ in requests]

    def add(self, delta: Delta) -> None:
        """Add the output of a step."""
        answer, output = self._answers[delta.index], delta.output
        answer.add(output)
        if output.finish_reason in ("stop", "length"):
            request = self._requests[delta.index]
            sampling = logged_sampling(request.params, request.sampling.seed)
            try:
                self._log.write(answer.line(self._model, None, request.prompt_token_ids, sampling))
            except OSError as error:
                log.warning("an answer could not be logged: %s", error)


def wants_log(header: str | None) -> bool:
    """Whether the value of `HEADER` asks for the answer to be logged."""
    return header is not None and header.strip().lower() in ("1", "true")
