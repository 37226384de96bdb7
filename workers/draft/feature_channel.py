"""The feature channel: features from target rank 0 to the draft, over a gloo group of two ranks, with credit.

Features cross as host memory. On CUDA, `workers.staging` copies them there first, so what a dead draft leaves
behind is a thread that waits, never a kernel on the device of target rank 0.

Target rank 0 announces for every round whether it sends features, so the draft never waits for features that will not
come. At most `CREDIT` rounds may be unacknowledged; beyond that, features are dropped, which leaves a gap in the
draft's cache.
"""

import logging
import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from protos.worker_messages import DraftChannelFailed, FromWorker
from workers.attention.batch import Ints
from workers.device import record_event, side_stream
from workers.distributed.groups import Group
from workers.draft.announce import Announcer, Listener
from workers.features import COUNT, Features
from workers.staging import HostStaging, StagingError

logger = logging.getLogger(__name__)

TARGET, DRAFT = 0, 1
"""Ranks within a draft channel."""
CREDIT = 8
"""Most rounds whose features are not acknowledged."""
POLL_S = 0.1
MAX_ANNOUNCEMENT_BYTES = 1 << 20
"""Of `FeaturesSent`: four numbers for each row of a round."""

Send = Callable[[FromWorker], None]
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


class FeaturesSent(msgspec.Struct, frozen=True):
    """Announces the features of a round, `[sum of counts, width]`; *table* is flat, and empty if none are sent."""

    round: int
    table: list[int] = []
    width: int = 0
    dtype: str = ""


class _Posted(NamedTuple):
    """The features of a round, on the device once `is_computed`; `features` is None where none are sent."""

    round: int
    features: Features | None = None
    is_computed: torch.cuda.Event | None = None


class FeatureSender:
    """The end of target rank 0. A thread stages and sends the posted features in order.

    Args:
        epoch: of the draft channel.
        group: of the two ranks, for host memory; used by the thread only.
        announcer: sends announcements to the draft; used by the thread only.
        send: sends a message to the controller.
        device: of the features.
    """

    def __init__(
        self, epoch: int, group: Group, announcer: Announcer[FeaturesSent], send: Send, *, device: torch.device
    ) -> None:
        self._epoch, self._group, self._announcer, self._send = epoch, group, announcer, send
        self._device, self._staging = device, HostStaging(device)
        self._queue: queue.SimpleQueue[_Posted | None] = queue.SimpleQueue()
        self._credit = threading.Semaphore(CREDIT)
        self._is_open = True
        threading.Thread(target=self._serve, name=f"draft-channel-{epoch}-features", daemon=True).start()

    def post(self, round_number: int, features: Features) -> None:
        """Send the features of a round in the background, or drop them where too many are unacknowledged."""
        if not len(features.table_M4) or not self._credit.acquire(blocking=False):
            self.post_none(round_number)
        elif self._is_open:
            self._queue.put(_Posted(round_number, features, record_event(self._device)))

    def post_none(self, round_number: int) -> None:
        """Tell the draft that no features of a round will come."""
        if self._is_open:
            self._queue.put(_Posted(round_number))

    def acknowledged(self, count: int) -> None:
        """Record that the draft has received the features of *count* rounds."""
        self._credit.release(count)

    def close(self) -> None:
        """Leave the channel; the thread ends by itself. May be called twice."""
        self._is_open = False
        self._queue.put(None)

    def _serve(self) -> None:
        try:
            with side_stream(self._device):
                while (posted := self._queue.get()) is not None and self._is_open:
                    self._transfer(posted)
        except Exception as error:  # only the channel has failed
            if self._is_open:
                self._is_open = False
                self._send(DraftChannelFailed(self._epoch, str(error)))
        finally:
            self._announcer.close()
            self._group.close()

    def _transfer(self, posted: _Posted) -> None:
        """Stage, announce and send the features of a round; without room to stage them, they are dropped."""
        states_NF = None if posted.features is None else self._staged(posted.features, posted.is_computed)
        if posted.features is None or states_NF is None:
            self._announcer.send(FeaturesSent(posted.round))
            return
        table = posted.features.table_M4.flatten().tolist()
        self._announcer.send(FeaturesSent(posted.round, table, states_NF.shape[1], str(states_NF.dtype)))
        self._group.send(states_NF, DRAFT)

    def _staged(self, features: Features, is_computed: torch.cuda.Event | None) -> torch.Tensor | None:
        try:
            return self._staging.to_host(features.states_NF, is_computed)
        except StagingError as error:
            logger.warning("the features of a round are dropped: %s", error)
            self._credit.release()
            return None


class FeatureReceiver:
    """The draft's end. A thread receives the announced features into host memory; `take` returns them.

    Args:
        epoch: of the draft channel.
        group: of the two ranks, for host memory; used by the thread only.
        listener: receives announcements; used by the thread only.
        send: sends a message to the controller.
    """

    def __init__(self, epoch: int, group: Group, listener: Listener[FeaturesSent], send: Send) -> None:
        self._epoch, self._group, self._listener, self._send = epoch, group, listener, send
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
        return arrived

    def close(self) -> None:
        """Leave the channel; the thread ends by itself."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()

    def _serve(self) -> None:
        try:
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
        table_M4: Ints = np.array(announced.table, np.int64).reshape(-1, 4)
        states_NF = torch.empty(int(table_M4[:, COUNT].sum()), announced.width, dtype=_DTYPES[announced.dtype])
        return Features(table_M4, self._group.recv(states_NF, TARGET))
