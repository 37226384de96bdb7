"""The draft channel: draft tokens from the draft worker to target rank 0, over a group of two ranks that may fail.

A posted receive cannot be withdrawn, and a send may block as long as the other rank is busy. So each end has a thread,
and a receive is posted only for tables that were announced. The two ends are in `workers.draft.receiver` and
`workers.draft.sender`; this module forms channels.
"""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Generic, TypeVar

import torch
from torch.distributed.distributed_c10d import Store

from protos.worker_messages import (
    DraftChannelFailed,
    DraftChannelReady,
    Drafted,
    FeaturesReceived,
    FormDraftChannel,
    FromWorker,
)
from workers.device import set_device
from workers.distributed.groups import Group, form
from workers.distributed.store import address_towards, connect_store
from workers.draft.announce import Announcer, Listener
from workers.draft.deadline import FLOOR_S, DraftDeadline
from workers.draft.feature_channel import DRAFT, TARGET, FeatureReceiver, FeatureSender, FeaturesSent
from workers.draft.receiver import DraftReceiver
from workers.draft.sender import DraftSender

FORM_S = 50.0
"""Forming takes at most this long at each end, less than the controller waits; so does each transfer."""

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
    backend: str,
    device: torch.device,
    floor_s: float = FLOOR_S,
    *,
    has_features: bool = False,
) -> DraftReceiver:
    """Form the end of target rank 0. Raises `GroupError` if the draft does not join."""
    store, host, form_group = _rendezvous(order, TARGET, backend, device)
    with ExitStack() as undo:
        listener: Listener[Drafted | FeaturesReceived] = Listener(
            store, str(order.epoch), host, Drafted | FeaturesReceived
        )
        undo.callback(listener.close)
        group = form_group(f"draft-channel/{order.epoch}")
        undo.callback(group.close)
        features = None
        if has_features:
            back = form_group(_features_name(order))
            undo.callback(back.close)
            announcer: Announcer[FeaturesSent] = Announcer(store, _features_name(order))
            features = FeatureSender(order.epoch, back, announcer, send, device=device)
        undo.pop_all()
    deadline = DraftDeadline(time.monotonic, floor_s)
    return DraftReceiver(order.epoch, group, listener, send, device=device, deadline=deadline, features=features)


def join_as_draft(
    order: FormDraftChannel, send: Send, backend: str, device: torch.device, *, has_features: bool = False
) -> DraftSender:
    """Form the draft's end. Raises `GroupError` if target rank 0 does not join."""
    store, host, form_group = _rendezvous(order, DRAFT, backend, device)
    with ExitStack() as undo:
        group = form_group(f"draft-channel/{order.epoch}")
        undo.callback(group.close)
        announcer: Announcer[Drafted | FeaturesReceived] = Announcer(store, str(order.epoch))
        undo.callback(announcer.close)
        features = None
        if has_features:
            listener: Listener[FeaturesSent] = Listener(store, _features_name(order), host, FeaturesSent)
            undo.callback(listener.close)
            features = FeatureReceiver(order.epoch, form_group(_features_name(order)), listener, send, device=device)
        undo.pop_all()
    return DraftSender(order.epoch, group, announcer, send, device=device, features=features)


def _rendezvous(
    order: FormDraftChannel, rank: int, backend: str, device: torch.device
) -> tuple[Store, str, Callable[[str], Group]]:
    """Return the store of *order*, an address of this machine, and a function that forms a group of two by its name."""
    set_device(device)
    store, host = connect_store(order.store, FORM_S), address_towards(order.store.host)
    form_group = partial(
        form,
        store=store,
        rank=rank,
        size=2,
        backend=backend,
        device=device,
        host=host,
        timeout_s=FORM_S,
        is_vital=False,
    )
    return store, host, form_group


def _features_name(order: FormDraftChannel) -> str:
    return f"draft-channel/{order.epoch}/features"
