"""The feature channel: features from target rank 0 to the draft, over a group of two ranks of its own, with credit.

Target rank 0 announces for every round whether it sends features, so the draft never waits for features that will not
come. At most `CREDIT` rounds may be unacknowledged; beyond that, features are dropped, which leaves a gap in the
draft's cache.
"""

import queue
import threading
from collections.abc import Callable

import msgspec
import numpy as np
import torch

from protos.worker_messages import DraftChannelFailed, FromWorker
from workers.device import record_event, record_stream, side_stream, synchronize
from workers.distributed.groups import Group, close_without_waiting
from workers.draft.announce import Announcer, Listener
from workers.features import COUNT, Features

TARGET, DRAFT = 0, 1
"""Ranks within a draft channel."""
CREDIT = 8
"""Most rounds whose features are not acknowledged."""
POLL_S = 0.1

Send = Callable[[FromWorker], None]
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


class FeaturesSent(msgspec.Struct, frozen=True):
    """Announces the features of a round, `[sum of counts, width]`; *table* is flat, and empty if none are sent."""

    round: int
    table: list[int] = []
    width: int = 0
    dtype: str = ""


class FeatureSender:
    """The end of target rank 0. A thread sends the posted features in order.

    Args:
        epoch: of the draft channel.
        group: of the two ranks; used by the thread only.
        announcer: sends announcements to the draft; used by the caller only.
        send: sends a message to the controller.
        device: of the group's tensors.
    """

    def __init__(
        self, epoch: int, group: Group, announcer: Announcer[FeaturesSent], send: Send, *, device: torch.device
    ) -> None:
        self._epoch, self._group, self._announcer, self._send = epoch, group, announcer, send
        self._device = device
        self._queue: queue.SimpleQueue[tuple[torch.Tensor, torch.cuda.Event | None] | None] = queue.SimpleQueue()
        self._credit = threading.Semaphore(CREDIT)
        self._is_open = True
        threading.Thread(target=self._serve, name=f"draft-channel-{epoch}-features", daemon=True).start()

    def post(self, round_number: int, features: Features) -> None:
        """Send the features of a round in the background, or drop them where too many are unacknowledged."""
        if not self._is_open:
            return
        if not len(features.table_M4) or not self._credit.acquire(blocking=False):
            self._announcer.send(FeaturesSent(round_number))
            return
        states_NF = features.states_NF
        self._queue.put((states_NF, record_event(self._device)))
        self._announcer.send(
            FeaturesSent(round_number, features.table_M4.flatten().tolist(), states_NF.shape[1], str(states_NF.dtype))
        )

    def acknowledged(self, count: int) -> None:
        """Record that the draft has received the features of *count* rounds."""
        self._credit.release(count)

    def close(self) -> None:
        """Leave the channel; the thread ends by itself."""
        self._is_open = False
        self._queue.put(None)
        self._announcer.close()
        close_without_waiting(self._group, self._device)

    def _serve(self) -> None:
        try:
            with side_stream(self._device):
                while (posted := self._queue.get()) is not None:
                    states_NF, is_computed = posted
                    if is_computed is not None:
                        torch.cuda.current_stream().wait_event(is_computed)
                    self._group.send(states_NF, DRAFT)
                    synchronize(self._device)
        except Exception as error:  # only the channel has failed
            if self._is_open:
                self._is_open = False
                self._send(DraftChannelFailed(self._epoch, str(error)))
        finally:
            self._group.close()


class FeatureReceiver:
    """The draft's end. A thread receives the announced features; `take` returns them.

    Args:
        epoch: of the draft channel.
        group: of the two ranks; used by the thread only.
        listener: receives announcements; used by the thread only.
        send: sends a message to the controller.
        device: of the group's tensors.
    """

    def __init__(
        self, epoch: int, group: Group, listener: Listener[FeaturesSent], send: Send, *, device: torch.device
    ) -> None:
        self._epoch, self._group, self._listener, self._send = epoch, group, listener, send
        self._device = device
        self._changed = threading.Condition()
        self._arrived: list[Features] = []
        self._reached = -1
        self._is_open = True
        threading.Thread(target=self._serve, name=f"draft-channel-{epoch}-features", daemon=True).start()

    def take(self, round_number: int, timeout_s: float) -> list[Features]:
        """Return the features received, after the announcement of a round has arrived, or after *timeout_s*."""
        with self._changed:
            self._changed.wait_for(lambda: self._reached >= round_number or not self._is_open, timeout_s)
            arrived, self._arrived = self._arrived, []
        for features in arrived:
            record_stream(features.states_NF)
        return arrived

    def close(self) -> None:
        """Leave the channel; the thread ends by itself."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()
        close_without_waiting(self._group, self._device)

    def _serve(self) -> None:
        try:
            with side_stream(self._device):
                while self._is_open:
                    announced = self._listener.receive(POLL_S)
                    if announced is not None:
                        self._receive(announced)
        except Exception as error:  # only the channel has failed
            if self._is_open:
                self.close()
                self._send(DraftChannelFailed(self._epoch, str(error)))
        finally:
            self._listener.close()
            self._group.close()

    def _receive(self, announced: FeaturesSent) -> None:
        features = [self._fetch(announced)] if announced.table else []
        with self._changed:
            self._arrived += features
            self._reached = announced.round
            self._changed.notify_all()

    def _fetch(self, announced: FeaturesSent) -> Features:
        table_M4 = np.array(announced.table, np.int64).reshape(-1, 4)
        states_NF = torch.empty(
            int(table_M4[:, COUNT].sum()), announced.width, dtype=_DTYPES[announced.dtype], device=self._device
        )
        self._group.recv(states_NF, TARGET)
        synchronize(self._device)
        return Features(table_M4, states_NF)
