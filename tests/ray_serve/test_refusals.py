"""What Ray Serve logs of calls that are refused."""

import logging

import grpc
import pytest

pytestmark = pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`:DeprecationWarning")  # Ray's


@pytest.mark.parametrize(
    ("code", "is_written"), [("INVALID_ARGUMENT", False), ("UNAUTHENTICATED", False), ("INTERNAL", True)]
)
def test_serve_logs_errors_inside_the_server_and_not_what_clients_did(code: str, is_written: bool) -> None:
    from ray.serve.exceptions import gRPCStatusError

    from cluster.ray_serve.refusals import leave_out_refusals

    leave_out_refusals()
    written: list[logging.LogRecord] = []
    logger, handler = logging.getLogger("ray.serve"), logging.Handler()
    handler.emit = written.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        raise gRPCStatusError(RuntimeError("a reason"), grpc.StatusCode[code], "a reason")
    except gRPCStatusError:
        logger.exception("Request failed.")
    logger.error("something else")
    logger.removeHandler(handler)
    assert [record.getMessage() for record in written] == ["Request failed."] * is_written + ["something else"]
