"""The draft's end of the draft channel: sends drafts, each in one message, without waiting."""

from collections.abc import Callable

from protos.worker_messages import Drafted, FromWorker
from workers.draft.announce import Announcer
from workers.draft.feature_channel import FeatureReceiver
from workers.draft.wire import Ids, pack
from workers.draft_messages import FeaturesReceived, ToTargetRank0


class DraftSender:
    """The draft's end. Used by one thread.

    Args:
        epoch: of the channel.
        announcer: sends to target rank 0.
        send: sends a message to the controller.
        features: receives features, for a draft that is fed them.
    """

    def __init__(
        self,
        epoch: int,
        announcer: Announcer[ToTargetRank0],
        send: Callable[[FromWorker], None],
        *,
        features: FeatureReceiver | None = None,
    ) -> None:
        self.epoch = epoch
        self.features = features
        self._announcer, self._send = announcer, send
        self._is_open = True

    def post(self, table: Ids, round_number: int, propose_s: float) -> None:
        """Send *table*, int32 `[R, W]`, to target rank 0, and tell the controller."""
        if self._is_open:
            drafted = Drafted(round_number, self.epoch, propose_s)
            self._announcer.send(pack(table, drafted))
            self._send(drafted)

    def acknowledge(self, count: int) -> None:
        """Acknowledge the features of *count* rounds."""
        if self._is_open:
            self._announcer.send(FeaturesReceived(count))

    def close(self) -> None:
        """Leave the channel. May be called twice."""
        self._is_open = False
        self._announcer.close()
        if self.features is not None:
            self.features.close()
