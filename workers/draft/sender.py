"""The draft's end of the draft channel: sends drafts in the background."""

import queue
import threading
from collections.abc import Callable

import torch

from protos.worker_messages import DraftChannelFailed, Drafted, FeaturesReceived, FromWorker
from workers.device import side_stream
from workers.distributed.groups import Group, close_without_waiting
from workers.draft.announce import Announcer
from workers.draft.feature_channel import TARGET, FeatureReceiver
from workers.draft.wire import Ids


class DraftSender:
    """The draft's end: a thread sends the posted tables in order.

    Args:
        epoch: of the channel.
        group: of the two ranks; used by the thread only.
        announcer: sends announcements to target rank 0; used by the caller only.
        send: sends a message to the controller.
        device: of the group's tensors.
        features: receives features, for a draft that is fed them.
    """

    def __init__(
        self,
        epoch: int,
        group: Group,
        announcer: Announcer[Drafted | FeaturesReceived],
        send: Callable[[FromWorker], None],
        *,
        device: torch.device,
        features: FeatureReceiver | None = None,
    ) -> None:
        self.epoch = epoch
        self.features = features
        self._group, self._announcer, self._send, self._device = group, announcer, send, device
        self._queue: queue.SimpleQueue[Ids | None] = queue.SimpleQueue()
        self._is_open = True
        threading.Thread(target=self._serve, name=f"draft-channel-{epoch}-send", daemon=True).start()

    def post(self, table: Ids, round_number: int, propose_s: float) -> None:
        """Send *table* in the background, and announce it to target rank 0 and the controller."""
        if self._is_open:
            drafted = Drafted(round_number, self.epoch, propose_s, *table.shape)
            self._queue.put(table)
            self._announcer.send(drafted)
            self._send(drafted)

    def acknowledge(self, count: int) -> None:
        """Acknowledge the features of *count* rounds."""
        if self._is_open:
            self._announcer.send(FeaturesReceived(count))

    def close(self) -> None:
        """Leave the channel; its thread ends by itself."""
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
        except Exception as error:  # only the channel has failed
            if self._is_open:
                self._is_open = False
                self._send(DraftChannelFailed(self.epoch, str(error)))
        finally:
            self._group.close()
