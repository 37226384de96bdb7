"""The data plane of the draft: ids from the draft to target 0, over a group that may break without hurting anybody.

A receive that was posted cannot be withdrawn, and a send may block for as long as the other side is busy. So each end
is served by one thread and a queue, and a receive is posted only for ids that were announced. DESIGN section 4.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch

from protos.worker_messages import Drafted, FormPair, FromWorker, PairFailed, PairReady, Taken
from workers.device import set_device, side_stream
from workers.distributed.groups import Group, close_without_waiting, form
from workers.distributed.store import address_towards, connect_store
from workers.draft.announce import Announcer, Listener
from workers.draft.deadline import FLOOR_S, DraftDeadline
from workers.draft.feature_channel import DRAFT, TARGET, FeatureReceiver, FeatureSender, Shipped
from workers.draft.wire import Ids

logger = logging.getLogger(__name__)

FORM_S = 50.0
"""Forming takes at most this long at each end, less than the controller's patience; so does each transfer."""
LOOK_S = 0.1

Send = Callable[[FromWorker], None]
FromDraft = Drafted | Taken


@dataclass(frozen=True)
class Arrival:
    """What waiting brought: `table` is None where nothing came; `missed` says that the deadline passed."""

    table: Ids | None
    missed: bool = False


class End(Protocol):
    """One end of a formed pair."""

    @property
    def epoch(self) -> int:
        """Which pair it is."""
        ...

    def close(self) -> None:
        """Leave the pair; its thread ends by itself."""
        ...


class DraftReceiver:
    """Target 0's end: a thread receives what was announced; `collect` takes it, or goes on without.

    Args:
        epoch: which pair.
        group: of two; used by the thread alone.
        listener: brings announcements; used by the thread alone.
        send: tells the controller.
        device: where the group's tensors lie.
        patience: how long `collect` waits.
        features: the way back, for a draft that is fed them.
    """

    def __init__(
        self,
        epoch: int,
        group: Group,
        listener: Listener[FromDraft],
        send: Send,
        *,
        device: torch.device,
        patience: DraftDeadline,
        features: FeatureSender | None = None,
    ) -> None:
        self.epoch = epoch
        self.features = features
        self._group, self._listener, self._send, self._device = group, listener, send, device
        self._patience = patience
        self._changed = threading.Condition()
        self._arrived: dict[int, Ids] = {}
        self._is_open = True
        threading.Thread(target=self._serve, name=f"pair-{epoch}-receive", daemon=True).start()

    def collect(self, round_number: int, k: int) -> Arrival:
        """Return the ids of a round, waiting for at most a deadline, and not at all during an outage."""
        with self._changed:
            limit = self._patience.ask(round_number, k)
            self._changed.wait_for(lambda: round_number in self._arrived or not self._is_open, limit)
            table = self._arrived.pop(round_number, None)
            for old in [done for done in self._arrived if done < round_number]:
                del self._arrived[old]
            missed = table is None and limit > 0 and self._is_open
            if missed:
                self._patience.missed()
        return Arrival(table, missed)

    def scored(self, seconds: float) -> None:
        """A round took this long, waiting not counted."""
        with self._changed:
            self._patience.scored(seconds)

    def close(self) -> None:
        """See `End`."""
        self._shut()
        close_without_waiting(self._group, self._device)
        if self.features is not None:
            self.features.close()

    def _shut(self) -> None:
        with self._changed:
            self._is_open = False
            self._changed.notify_all()

    def _serve(self) -> None:
        try:
            with side_stream(self._device):
                while self._is_open:
                    message = self._listener.receive(LOOK_S)
                    if isinstance(message, Drafted):
                        self._take(message)
                    elif isinstance(message, Taken) and self.features is not None:
                        self.features.acknowledged(message.count)
        except Exception as error:  # whatever it is: the pair is of no more use, and nobody else may be hurt
            self._break(error)
        finally:
            self._listener.close()
            self._group.close()

    def _take(self, drafted: Drafted) -> None:
        ids = torch.empty(drafted.rows, drafted.width, dtype=torch.int32, device=self._device)
        table = self._group.recv(ids, DRAFT).cpu().numpy()
        with self._changed:
            if self._is_open:  # else the receive was broken off
                self._patience.arrived(drafted)
                self._arrived[drafted.round] = table
                self._changed.notify_all()

    def _break(self, error: Exception) -> None:
        if self._is_open:
            self._shut()
            self._send(PairFailed(self.epoch, str(error)))


class DraftSender:
    """The draft's end: a thread sends what was posted, in order.

    Args:
        epoch: which pair.
        group: of two; used by the thread alone.
        announcer: tells target 0; used by the caller alone.
        send: tells the controller.
        device: where the group's tensors lie.
        features: the way back, for a draft that is fed them.
    """

    def __init__(
        self,
        epoch: int,
        group: Group,
        announcer: Announcer[FromDraft],
        send: Send,
        *,
        device: torch.device,
        features: FeatureReceiver | None = None,
    ) -> None:
        self.epoch = epoch
        self.features = features
        self._group, self._announcer, self._send, self._device = group, announcer, send, device
        self._queue: queue.SimpleQueue[Ids | None] = queue.SimpleQueue()
        self._is_open = True
        threading.Thread(target=self._serve, name=f"pair-{epoch}-send", daemon=True).start()

    def post(self, table: Ids, round_number: int, propose_s: float) -> None:
        """Send *table* in the background, and announce it to target 0 and to the controller."""
        if self._is_open:
            drafted = Drafted(round_number, self.epoch, propose_s, *table.shape)
            self._queue.put(table)
            self._announcer.send(drafted)
            self._send(drafted)

    def acknowledge(self, count: int) -> None:
        """Tell target 0 that the features of *count* rounds were taken."""
        if self._is_open:
            self._announcer.send(Taken(count))

    def close(self) -> None:
        """See `End`."""
        self._is_open = False
        self._queue.put(None)
        self._announcer.close()
        close_without_waiting(self._group, self._device)
        if self.features is not None:
            self.features.close()

    def _serve(self) -> None:
        try:
            with side_stream(self._device):
                while (table := self._queue.get()) is not None:
                    self._group.send(torch.from_numpy(table).to(self._device), TARGET)
        except Exception as error:  # as at the other end
            if self._is_open:
                self._is_open = False
                self._send(PairFailed(self.epoch, str(error)))
        finally:
            self._group.close()


AnyEnd = TypeVar("AnyEnd", bound=End)


class Pairing(Generic[AnyEnd]):
    """Forms pairs in the background; the newest one that is formed is the one in use.

    Args:
        send: tells the controller.
        join: forms one end; called in a thread of its own.
    """

    def __init__(self, send: Send, join: Callable[[FormPair], AnyEnd]) -> None:
        self._send, self._join = send, join
        self._lock = threading.Lock()
        self._end: AnyEnd | None = None
        self._retired: list[AnyEnd] = []  # closed by whoever uses them: an end is used by one thread
        self._is_open = True

    def form(self, order: FormPair) -> None:
        """Leave the pair there is, and begin to form another; the controller hears how it went."""
        with self._lock:
            self._close_retired()
            if self._end is not None and self._end.epoch < order.epoch:
                self._end.close()
                self._end = None
        threading.Thread(target=self._form, args=(order,), name=f"pair-{order.epoch}-form", daemon=True).start()

    def end(self, epoch: int) -> AnyEnd | None:
        """Return our end of pair *epoch*, None where it is not formed."""
        with self._lock:
            self._close_retired()
            return self._end if self._end is not None and self._end.epoch == epoch else None

    def close(self) -> None:
        """Leave the pair there is, and any that is still being formed."""
        with self._lock:
            self._is_open = False
            self._close_retired()
            if self._end is not None:
                self._end.close()

    def _close_retired(self) -> None:
        while self._retired:
            self._retired.pop().close()

    def _form(self, order: FormPair) -> None:
        try:
            end = self._join(order)
        except Exception as error:
            self._send(PairFailed(order.epoch, str(error)))
            return
        if self._install(end):
            self._send(PairReady(order.epoch))

    def _install(self, end: AnyEnd) -> bool:
        """Make *end* the one in use, unless a newer one is there."""
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
    order: FormPair,
    send: Send,
    backend: str,
    device: torch.device,
    floor_s: float = FLOOR_S,
    *,
    has_features: bool = False,
) -> DraftReceiver:
    """Form target 0's end. Raises `GroupError` where the draft does not come."""
    set_device(device)
    store, host = connect_store(order.store, FORM_S), address_towards(order.store.host)
    two = partial(
        form,
        store=store,
        rank=TARGET,
        size=2,
        backend=backend,
        device=device,
        host=host,
        timeout_s=FORM_S,
        is_vital=False,
    )
    with ExitStack() as undo:
        listener: Listener[FromDraft] = Listener(store, str(order.epoch), host, FromDraft)
        undo.callback(listener.close)
        group = two(f"pair/{order.epoch}")
        undo.callback(group.close)
        features = None
        if has_features:
            back = two(_features(order))
            undo.callback(back.close)
            announcer: Announcer[Shipped] = Announcer(store, _features(order))
            features = FeatureSender(order.epoch, back, announcer, send, device=device)
        undo.pop_all()
    patience = DraftDeadline(time.monotonic, floor_s)
    return DraftReceiver(order.epoch, group, listener, send, device=device, patience=patience, features=features)


def join_as_draft(
    order: FormPair, send: Send, backend: str, device: torch.device, *, has_features: bool = False
) -> DraftSender:
    """Form the draft's end. Raises `GroupError` where target 0 does not come."""
    set_device(device)
    store, host = connect_store(order.store, FORM_S), address_towards(order.store.host)
    two = partial(
        form,
        store=store,
        rank=DRAFT,
        size=2,
        backend=backend,
        device=device,
        host=host,
        timeout_s=FORM_S,
        is_vital=False,
    )
    with ExitStack() as undo:
        group = two(f"pair/{order.epoch}")
        undo.callback(group.close)
        announcer: Announcer[FromDraft] = Announcer(store, str(order.epoch))
        undo.callback(announcer.close)
        features = None
        if has_features:
            listener: Listener[Shipped] = Listener(store, _features(order), host, Shipped)
            undo.callback(listener.close)
            features = FeatureReceiver(order.epoch, two(_features(order)), listener, send, device=device)
        undo.pop_all()
    return DraftSender(order.epoch, group, announcer, send, device=device, features=features)


def _features(order: FormPair) -> str:
    return f"pair/{order.epoch}/features"
