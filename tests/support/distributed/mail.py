"""Waiting for messages of a worker group."""

import time

from protos.worker_messages import FromWorker, WorkerGroup, WorkerId

PATIENCE_S = 120.0
Mail = list[tuple[WorkerId, FromWorker]]


def until(gang: WorkerGroup, *wanted: type) -> Mail:
    """Receive until there is a message of each wanted type; return all messages."""
    mail: Mail = []
    missing, deadline = list(wanted), time.monotonic() + PATIENCE_S
    while missing:
        assert time.monotonic() < deadline, (missing, mail)
        for worker, message in gang.receive(0.2):
            mail.append((worker, message))
            if type(message) in missing:
                missing.remove(type(message))
    return mail
