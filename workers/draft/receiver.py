"""Target rank 0's end of the draft channel: receives drafts until a deadline."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from protos.worker_messages import DraftChannelFailed, FromWorker
from workers.draft.announce import Listener
from workers.draft.deadline import DraftDeadline
from workers.draft.feature_channel import FeatureSender
from workers.draft.wire import Ids, unpack
from workers.draft_messages import DraftTable, FeaturesReceived, ToTargetRank0

POLL_S = 0.1
"""The thread checks this often whether the channel was closed."""


@dataclass(frozen=True)
class ReceivedTable:
    """Result of waiting: `table` is None if nothing came; `missed`: the deadline passed."""

    table: Ids | None
    missed: bool = False


class DraftReceiver:
    """The end of target rank 0: a thread receives the draft's messages, `collect` returns the tables.

    A message is complete when it arrives, so neither the step loop nor the device ever waits for a draft that is dead.

    Args:
        epoch: of the channel.
        listener: receives the draft's messages; used by the thread only.
        send: sends a message to the controller.
        deadline: how long `collect` waits.
        features: sends features to a draft that is fed them.
    """

    def __init__(
        self,
        epoch: int,
        listener: Listener[ToTargetRank0],
        send: Callable[[FromWorker], None],
        *,
        deadline: DraftDeadline,
        features: FeatureSender | None = None,
    ) -> None:
        self.epoch = epoch
        self.features = features
        self._listener, self._send, self._deadline = listener, send, deadline
        self._changed = threading.Condition()
        self._arrived: dict[int, Ids] = {}
        self._is_open = True
        threading.Thread(target=self._serve, name=f"draft-channel-{epoch}-receive", daemon=True).start()

    def collect(self, round_number: int, k: int) -> ReceivedTable:
        """Return the table of a round; wait until the deadline at most, and not at all after a missed one."""
        with self._changed:
            limit = self._deadline.start(round_number, k)
            self._changed.wait_for(lambda: round_number in self._arrived or not self._is_open, limit)
            table = self._arrived.pop(round_number, None)
            for old in [done for done in self._arrived if done < round_number]:
                del self._arrived[old]
            missed = table is None and limit > 0 and self._is_open
            if missed:
                self._deadline.missed()
        return ReceivedTable(table, missed)

    def scored(self, seconds: float) -> None:
        """Record the duration of a round, without waiting."""
        with self._changed:
            self._deadline.scored(seconds)

    def close(self) -> None:
        """Leave the channel; its thread ends by itself."""
        self._shut()
        if self.features is not None:
            self.features.close()

    def _shut(self) -> None:
        with self._changed:
            self._is_open = False
            self._changed.notify_all()

    def _serve(self) -> None:
        try:
            while self._is_open:
                message = self._listener.receive(POLL_S)
                if isinstance(message, DraftTable):
                    self._take(message)
                elif isinstance(message, FeaturesReceived) and self.features is not None:
                    self.features.acknowledged(message.count)
        except Exception as error:  # only the channel has failed
            self._fail(error)
        finally:
            self._listener.close()

    def _take(self, message: DraftTable) -> None:
        table, drafted = unpack(message), message.drafted
        with self._changed:
            self._deadline.arrived(drafted)
            self._arrived[drafted.round] = table
            self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        if self._is_open:
            self._shut()
            self._send(DraftChannelFailed(self.epoch, str(error)))
