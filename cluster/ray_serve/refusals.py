"""Keeps refused gRPC calls out of Ray Serve's log: it writes a traceback for each, in the replica and in the proxy.

Serve has no way to end a call with a status but an exception. Its access log still has a line for each call.
"""

import logging

import grpc
from ray.serve._private.constants import SERVE_LOGGER_NAME
from ray.serve.exceptions import gRPCStatusError


class RefusalFilter(logging.Filter):
    """Drops records of calls that ended with a status which says what the client can do."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether *record* is written. Errors inside the server are."""
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, gRPCStatusError) or error.grpc_code in (None, grpc.StatusCode.INTERNAL)


FILTER = RefusalFilter()


def leave_out_refusals() -> None:
    """Have Serve's logger in this process leave them out. May be called more than once."""
    logging.getLogger(SERVE_LOGGER_NAME).addFilter(FILTER)
