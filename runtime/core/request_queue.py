"""Every request in the engine: which wait, which run, and the slots and blocks of those that run."""

from collections import deque

from runtime.core.block_manager import BlockManager
from runtime.core.sequence import NO_SLOT, Sequence


class RequestQueue:
    """The waiting and running sequences, the worker slots and the blocks. Owned by the `Scheduler`.

    `running` and `waiting` are in order of arrival, and every running sequence arrived before every waiting one. So
    the oldest request is always served first and is never preempted.

    Args:
        num_slots: most sequences that run at once.
        blocks: the KV blocks.
    """

    def __init__(self, num_slots: int, blocks: BlockManager) -> None:
        self.blocks = blocks
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.num_preemptions = 0
        self._num_slots = num_slots
        self._slots = list(range(num_slots - 1, -1, -1))
        self._by_id: dict[str, Sequence] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def has_slot(self) -> bool:
        """Whether one more sequence may run."""
        return bool(self._slots)

    def find(self, request_id: str) -> Sequence | None:
        """Return the unfinished sequence of this id."""
        return self._by_id.get(request_id)

    def unfinished(self) -> list[Sequence]:
        """Return all waiting and running sequences, in order of arrival."""
        return list(self._by_id.values())

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence at the end of the waiting ones."""
        self._by_id[sequence.request.request_id] = sequence
        self.waiting.append(sequence)

    def start_first(self) -> Sequence:
        """Give the first waiting sequence a slot; the caller sets its blocks."""
        sequence = self.waiting.popleft()
        sequence.slot = self._slots.pop()
        self.running.append(sequence)
        return sequence

    def preempt_youngest(self) -> None:
        """Move the youngest running sequence to the front of the waiting ones; all its tokens are computed again."""
        self._requeue_youngest()
        self.num_preemptions += 1

    def _requeue_youngest(self) -> None:
        sequence = self.running.pop()
        self._release(sequence)
        self.waiting.appendleft(sequence)

    def requeue_all(self) -> None:
        """Move every running sequence to the front of the waiting ones, and empty the prefix cache."""
        while self.running:
            self._requeue_youngest()
        self.blocks.forget_all()

    def resend_all(self) -> None:
        """Send every running sequence in full with its next row."""
        for sequence in self.running:
            sequence.num_sent_tokens = sequence.num_sent_blocks = 0

    def remove(self, sequence: Sequence) -> None:
        """Remove an ended sequence and free its slot and blocks."""
        del self._by_id[sequence.request.request_id]
        if sequence.slot == NO_SLOT:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.blocks.free(sequence.block_ids)
        self._slots.append(sequence.slot)
        sequence.release_slot()

    def check_integrity(self) -> None:
        """Check blocks, slots and queues against each other.

        Raises:
            RuntimeError: they disagree.
        """
        self.blocks.check_integrity([sequence.block_ids for sequence in self._by_id.values()])
        slots = sorted([*self._slots, *(sequence.slot for sequence in self.running)])
        if slots != list(range(self._num_slots)):
            raise RuntimeError(f"slots {slots} are not each of {self._num_slots} once")
        if [*self.running, *self.waiting] != self.unfinished():
            raise RuntimeError("running and waiting sequences are not all unfinished ones in order of arrival")
