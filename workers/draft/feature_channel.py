"""The way of features from target 0 to the draft: beside the pair, over a group of its own, and with credit.

Target 0 announces what it sends, and what it does not: the draft never waits for something that will not come. Of what
the draft has not acknowledged, a few rounds at most are on their way; beyond, features are dropped, which leaves a gap
in what the draft sees. DESIGN section 4.
"""

import queue
import threading
from collections.abc import Callable

import msgspec
import numpy as np
import torch

from protos.worker_messages import FromWorker, PairFailed
from workers.device import adopt, finish, mark, side_stream
from workers.distributed.groups import Group, close_without_waiting
from workers.draft.announce import Announcer, Listener
from workers.features import COUNT, Features

TARGET, DRAFT = 0, 1
"""Ranks within a pair."""
CREDIT = 8
"""Rounds whose features may be on their way."""
LOOK_S = 0.1

Send = Callable[[FromWorker], None]
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


class Shipped(msgspec.Struct, frozen=True):
    """Features of a round are on their way, `[sum of counts, width]`; *table* is flat, and empty where none are."""

    round: int
    table: list[int] = []
    width: int = 0
    dtype: str = ""


class FeatureSender:
    """Target 0's end. A thread sends what was posted, in order.

    Args:
        epoch: of the pair.
        group: of two; used by the thread alone.
        announcer: tells the draft; used by the caller alone.
        send: tells the controller.
        device: where the group's tensors lie.
    """

    def __init__(
        self, epoch: int, group: Group, announcer: Announcer[Shipped], send: Send, *, device: torch.device
    ) -> None:
        self._epoch, self._group, self._announcer, self._send = epoch, group, announcer, send
        self._device = device
        self._queue: queue.SimpleQueue[tuple[torch.Tensor, torch.cuda.Event | None] | None] = queue.SimpleQueue()
        self._credit = threading.Semaphore(CREDIT)
        self._is_open = True
        threading.Thread(target=self._serve, name=f"pair-{epoch}-features", daemon=True).start()

    def post(self, round_number: int, features: Features) -> None:
        """Send the features of a round in the background, or drop them where too many are unacknowledged."""
        if not self._is_open:
            return
        if not len(features.table_M4) or not self._credit.acquire(blocking=False):
            self._announcer.send(Shipped(round_number))
            return
        states_NF = features.states_NF
        self._queue.put((states_NF, mark(self._device)))
        self._announcer.send(
            Shipped(round_number, features.table_M4.flatten().tolist(), states_NF.shape[1], str(states_NF.dtype))
        )

    def acknowledged(self, count: int) -> None:
        """The draft took the features of *count* rounds."""
        self._credit.release(count)

    def close(self) -> None:
        """Send no more; the thread ends by itself."""
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
                    finish(self._device)
        except Exception as error:  # whatever it is: the pair is of no more use, and nobody else may be hurt
            if self._is_open:
                self._is_open = False
                self._send(PairFailed(self._epoch, str(error)))
        finally:
            self._group.close()


class FeatureReceiver:
    """The draft's end. A thread receives what was announced; `take` hands it over.

    Args:
        epoch: of the pair.
        group: of two; used by the thread alone.
        listener: brings announcements; used by the thread alone.
        send: tells the controller.
        device: where the group's tensors lie.
    """

    def __init__(
        self, epoch: int, group: Group, listener: Listener[Shipped], send: Send, *, device: torch.device
    ) -> None:
        self._epoch, self._group, self._listener, self._send = epoch, group, listener, send
        self._device = device
        self._changed = threading.Condition()
        self._arrived: list[Features] = []
        self._reached = -1
        self._is_open = True
        threading.Thread(target=self._serve, name=f"pair-{epoch}-features", daemon=True).start()

    def take(self, round_number: int, patience_s: float) -> list[Features]:
        """Return what came in, after waiting until it is known what there is of a round, or for *patience_s*."""
        with self._changed:
            self._changed.wait_for(lambda: self._reached >= round_number or not self._is_open, patience_s)
            arrived, self._arrived = self._arrived, []
        for features in arrived:
            adopt(features.states_NF)
        return arrived

    def close(self) -> None:
        """Receive no more; the thread ends by itself."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()
        close_without_waiting(self._group, self._device)

    def _serve(self) -> None:
        try:
            with side_stream(self._device):
                while self._is_open:
                    shipped = self._listener.receive(LOOK_S)
                    if shipped is not None:
                        self._receive(shipped)
        except Exception as error:  # as at the other end
            if self._is_open:
                self.close()
                self._send(PairFailed(self._epoch, str(error)))
        finally:
            self._listener.close()
            self._group.close()

    def _receive(self, shipped: Shipped) -> None:
        features = [self._fetch(shipped)] if shipped.table else []
        with self._changed:
            self._arrived += features
            self._reached = shipped.round
            self._changed.notify_all()

    def _fetch(self, shipped: Shipped) -> Features:
        table_M4 = np.array(shipped.table, np.int64).reshape(-1, 4)
        states_NF = torch.empty(
            int(table_M4[:, COUNT].sum()), shipped.width, dtype=_DTYPES[shipped.dtype], device=self._device
        )
        self._group.recv(states_NF, TARGET)
        finish(self._device)
        return Features(table_M4, states_NF)
