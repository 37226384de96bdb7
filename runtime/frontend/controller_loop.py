"""The loop that runs a controller and reports to its frontend."""

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from protos.errors import SlipstreamError
from protos.interfaces import Inbox
from protos.progress import ProgressCallback
from protos.stats import EngineStats
from runtime.frontend.channel import Failed, LoadProgress, Outputs, Ready, Report

if TYPE_CHECKING:
    from runtime.core.controller import Controller

log = logging.getLogger("slipstream")

STATS_EVERY_S = 0.25
HEARTBEAT_S = 1.0
"""Longest time between two reports outside a step. A longer silence means a long step or a hang."""


def serve_controller(
    build: Callable[[ProgressCallback], "Controller"], inbox: Inbox, send: Callable[[Report], None]
) -> bool:
    """Build a controller and run it to its end, sending progress, readiness and failure. False after a failure."""
    controller = None
    try:
        controller = build(lambda text: send(LoadProgress(text)))
        send(Ready(controller.info))
        run_controller(controller, inbox, send)
    except SlipstreamError as error:
        if error.__cause__ is not None:
            log.exception("the controller failed")
        send(Failed(str(error), type(error).__name__))
        return False
    except Exception as error:
        log.exception("the controller failed")
        send(Failed(f"the controller failed: {type(error).__name__}"))
        return False
    finally:
        if controller is not None:
            controller.shutdown()
    return True


def run_controller(controller: "Controller", inbox: Inbox, send: Callable[[Outputs], None]) -> None:
    """Step until *inbox* is stopped; send outputs, changed statistics, and an empty report every `HEARTBEAT_S`."""
    last_stats, due, sent_at = EngineStats(), 0.0, time.monotonic()
    while not inbox.stopped:
        outputs = controller.step()
        stats = None
        if (now := time.monotonic()) >= due:
            due = now + STATS_EVERY_S
            current = controller.stats()
            if current != last_stats:
                stats = last_stats = current
        if outputs or stats is not None or now - sent_at >= HEARTBEAT_S:
            sent_at = now
            send(Outputs(outputs, stats))
