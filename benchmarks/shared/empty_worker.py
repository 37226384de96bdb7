"""Workers that compute nothing, for the time of a round: over the channel, and as a Ray actor."""

import os
import time
from collections.abc import Callable

import msgspec
import numpy as np
import torch

from protos.messages import RoundPlan
from protos.worker_messages import (
    DraftChannelReady,
    FormDraftChannel,
    Placed,
    Plan,
    Port,
    RoundDone,
    Setup,
    Stop,
    WorkerId,
)
from workers.distributed.store import open_store
from workers.draft.channel import join_as_draft, join_as_target
from workers.draft.receiver import DraftReceiver
from workers.draft.sender import DraftSender
from workers.draft.wire import STAMP, most_bytes

TIMEOUT_S = 60.0
CPU = torch.device("cpu")
DRAFT = WorkerId("draft")


def serve(port: Port, *place: str) -> None:
    """Run a worker that computes nothing; target 0 answers every plan, with a pair after receiving draft tokens."""
    _store, address = open_store()
    port.send(Placed("", "", os.getpid(), store=address))
    act: Callable[[RoundPlan], None] = _ignore
    setup = Setup("", DRAFT, 1, "cpu", "gloo")
    while not isinstance(message := port.receive(None), Stop):
        if isinstance(message, Plan):
            act(message.plan)
        elif isinstance(message, Setup):
            setup = message
            act = _answering(port, None) if is_first(setup.worker) else _ignore
        elif isinstance(message, FormDraftChannel):
            act = _paired(port, setup.worker, message, int(setup.config))


def is_first(worker: WorkerId) -> bool:
    return worker.role == "target" and worker.rank == 0


def _ignore(plan: RoundPlan) -> None:
    """Do nothing in a round."""


def _paired(port: Port, me: WorkerId, order: FormDraftChannel, num_tokens: int) -> Callable[[RoundPlan], None]:
    """Form this end of the draft channel; return what to do in each round."""
    if is_first(me):
        receiver = join_as_target(order, port.send, CPU, TIMEOUT_S, max_bytes=most_bytes(1, num_tokens))
        port.send(DraftChannelReady(order.epoch))
        return _answering(port, receiver)
    sender = join_as_draft(order, port.send)
    port.send(DraftChannelReady(order.epoch))
    return _sending(sender, num_tokens)


def _answering(port: Port, end: DraftReceiver | None) -> Callable[[RoundPlan], None]:
    def act(plan: RoundPlan) -> None:
        began = time.monotonic()
        if plan.epoch and (end is None or end.collect(plan.round, 1).table is None):
            raise RuntimeError(f"no draft tokens arrived in round {plan.round}")
        port.send(RoundDone(plan.round, (), wait_s=time.monotonic() - began))

    return act


def _sending(end: DraftSender, num_tokens: int) -> Callable[[RoundPlan], None]:
    ids = np.zeros((1, STAMP + num_tokens), np.int32)

    def act(plan: RoundPlan) -> None:
        if plan.epoch:
            end.post(ids, plan.round, 0.0)

    return act


class EmptyActor:
    """The same worker as an actor, called for each round."""

    def __init__(self) -> None:
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(RoundPlan)

    def round(self, plan: bytes) -> bytes:
        """Answer a round."""
        return self._encoder.encode(RoundDone(self._decoder.decode(plan).round, ()))
