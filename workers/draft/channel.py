"""The draft channel: draft tokens from the draft worker to target rank 0, and features back for drafts that read them.

Draft tokens travel in messages between the hosts, in no collective: nothing on the device of target rank 0 ever waits
for a draft, which may be dead. Features have a group of two ranks over gloo, on host memory for the same reason. The
two ends are in `workers.draft.receiver` and `workers.draft.sender`; this module forms channels.
"""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Generic, TypeVar

import torch
from torch.distributed.distributed_c10d import Store

from protos.worker_messages import DraftChannelFailed, DraftChannelReady, FormDraftChannel, FromWorker
from workers.distributed.groups import Group, GroupError
from workers.distributed.store import address_towards, connect_store
from workers.distributed.torch_group import form
from workers.draft.announce import Announcer, Listener
from workers.draft.deadline import FLOOR_S, DraftDeadline
from workers.draft.feature_channel import (
    DRAFT,
    MAX_ANNOUNCEMENT_BYTES,
    TARGET,
    FeatureReceiver,
    FeatureSender,
    FeaturesSent,
)
from workers.draft.receiver import DraftReceiver
from workers.draft.sender import DraftSender
from workers.draft_messages import DraftJoined, ToTargetRank0

FORM_S = 50.0
"""Forming takes at most this long at each end, less than the controller waits; so does each transfer of features."""

Send = Callable[[FromWorker], None]
End = TypeVar("End", DraftReceiver, DraftSender)


class DraftChannels(Generic[End]):
    """Forms draft channels in the background; the newest one that is formed is in use.

    Args:
        send: sends a message to the controller.
        join: forms this process's end of a channel; called in a thread of its own.
    """

    def __init__(self, send: Send, join: Callable[[FormDraftChannel], End]) -> None:
        self._send = send
        self._join: Callable[[FormDraftChannel], End] = join
        self._lock = threading.Lock()
        self._end: End | None = None
        self._retired: list[End] = []  # closed in the thread that uses them
        self._is_open = True

    def form(self, order: FormDraftChannel) -> None:
        """Leave the present channel, and begin to form another; the result is sent to the controller."""
        with self._lock:
            self._close_retired()
            if self._end is not None and self._end.epoch < order.epoch:
                self._end.close()
                self._end = None
        threading.Thread(
            target=self._form, args=(order,), name=f"draft-channel-{order.epoch}-form", daemon=True
        ).start()

    def end(self, epoch: int) -> End | None:
        """Return this end of channel *epoch*; None if it is not formed."""
        with self._lock:
            self._close_retired()
            return self._end if self._end is not None and self._end.epoch == epoch else None

    def close(self) -> None:
        """Leave the present channel, and any that is being formed."""
        with self._lock:
            self._is_open = False
            self._close_retired()
            if self._end is not None:
                self._end.close()

    def _close_retired(self) -> None:
        while self._retired:
            self._retired.pop().close()

    def _form(self, order: FormDraftChannel) -> None:
        try:
            end = self._join(order)
        except Exception as error:
            self._send(DraftChannelFailed(order.epoch, str(error)))
            return
        if self._install(end):
            self._send(DraftChannelReady(order.epoch))

    def _install(self, end: End) -> bool:
        """Use *end*, unless a newer one is in use; return whether it is used."""
        with self._lock:
            is_newest = self._is_open and (self._end is None or self._end.epoch < end.epoch)
            if is_newest and self._end is not None:
                self._retired.append(self._end)
            if is_newest:
                self._end = end
            else:
                end.close()
        return is_newest


def join_as_target(
    order: FormDraftChannel,
    send: Send,
    device: torch.device,
    floor_s: float = FLOOR_S,
    *,
    max_bytes: int,
    has_features: bool = False,
) -> DraftReceiver:
    """Form the end of target rank 0; features are on *device*, and messages of more than *max_bytes* are refused.

    Raises:
        GroupError: the draft does not join.
    """
    store, host = _meet(order)
    with ExitStack() as undo:
        listener: Listener[ToTargetRank0] = Listener(store, str(order.epoch), host, ToTargetRank0, max_bytes)
        undo.callback(listener.close)
        features = None
        if has_features:
            back = _form_features(order, TARGET, store, host)
            undo.callback(back.close)
            announcer: Announcer[FeaturesSent] = Announcer(store, _features_name(order))
            features = FeatureSender(order.epoch, back, announcer, send, device=device)
            undo.callback(features.close)
        if not isinstance(listener.receive(FORM_S), DraftJoined):
            raise GroupError(f"draft channel {order.epoch}: the draft did not connect to {host} within {FORM_S:.0f} s")
        undo.pop_all()
    deadline = DraftDeadline(time.monotonic, floor_s)
    return DraftReceiver(order.epoch, listener, send, deadline=deadline, features=features)


def join_as_draft(order: FormDraftChannel, send: Send, *, has_features: bool = False) -> DraftSender:
    """Form the draft's end. Raises `GroupError` if target rank 0 does not join."""
    store, host = _meet(order)
    with ExitStack() as undo:
        announcer: Announcer[ToTargetRank0] = Announcer(store, str(order.epoch))
        undo.callback(announcer.close)
        features = None
        if has_features:
            listener: Listener[FeaturesSent] = Listener(
                store, _features_name(order), host, FeaturesSent, MAX_ANNOUNCEMENT_BYTES
            )
            undo.callback(listener.close)
            features = FeatureReceiver(order.epoch, _form_features(order, DRAFT, store, host), listener, send)
        announcer.send(DraftJoined())
        undo.pop_all()
    return DraftSender(order.epoch, announcer, send, features=features)


def _meet(order: FormDraftChannel) -> tuple[Store, str]:
    """Return the store of *order*, and the address of this machine that the other end reaches."""
    return connect_store(order.store, FORM_S), address_towards(order.store.host)


def _form_features(order: FormDraftChannel, rank: int, store: Store, host: str) -> Group:
    """Form the group of features: over gloo, on CUDA devices, too."""
    return form(_features_name(order), store, rank, 2, host=host, timeout_s=FORM_S)


def _features_name(order: FormDraftChannel) -> str:
    return f"draft-channel/{order.epoch}/features"
