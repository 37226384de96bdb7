"""Waiting for messages of a worker group."""

import time

from protos.worker_messages import FromWorker, Heartbeat, WorkerGroup, WorkerId

PATIENCE_S = 120.0
Messages = list[tuple[WorkerId, FromWorker]]


def until(group: WorkerGroup, *wanted: type) -> Messages:
    """Receive until there is a message of each wanted type; return all messages, heartbeats only if wanted."""
    messages: Messages = []
    missing, deadline = list(wanted), time.monotonic() + PATIENCE_S
    while missing:
        assert time.monotonic() < deadline, (missing, messages)
        for worker, message in group.receive(0.2):
            if Heartbeat in wanted or not isinstance(message, Heartbeat):
                messages.append((worker, message))
            if type(message) in missing:
                missing.remove(type(message))
    return messages
