"""Every request in the engine: who waits, who runs, and what the running ones hold."""

from collections import deque
from collections.abc import Callable

from protos.messages import TokenOutput
from runtime.core.block_manager import BlockManager
from runtime.core.sequence import NO_SLOT, Sequence


def _nobody(sequence: Sequence) -> None:
    """Nobody asks."""


class RequestQueue:
    """The queues, the worker slots and the blocks. Owned by the `Scheduler`.

    `running` and `waiting` are in order of arrival, and everything running arrived before everything
    waiting; so the oldest request is always first in line and is never preempted. `departed` is told of every
    sequence that leaves for good.
    """

    def __init__(self, num_slots: int, blocks: BlockManager, departed: Callable[[Sequence], None] = _nobody) -> None:
        self.blocks = blocks
        self._departed = departed
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
        """Return the live sequence of this id."""
        return self._by_id.get(request_id)

    def everyone(self) -> list[Sequence]:
        """Return all live sequences."""
        return list(self._by_id.values())

    def enter(self, sequence: Sequence) -> None:
        """Let a new sequence wait, last in line."""
        self._by_id[sequence.request.request_id] = sequence
        self.waiting.append(sequence)

    def run_first(self) -> Sequence:
        """Give the first waiting sequence a slot; its blocks are the caller's to set."""
        sequence = self.waiting.popleft()
        sequence.slot = self._slots.pop()
        self.running.append(sequence)
        return sequence

    def preempt_youngest(self) -> None:
        """Send the youngest running sequence back, first in line, with everything to be computed again."""
        sequence = self.running.pop()
        self._release(sequence)
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def tell_all_again(self) -> None:
        """Let the workers be told in full of every running sequence when it runs next."""
        for sequence in self.running:
            sequence.num_told_tokens = sequence.num_told_blocks = 0

    def give_up(self) -> None:
        """Send everything that runs back in line, in order of arrival, and forget what any block holds."""
        while self.running:
            sequence = self.running.pop()
            self._release(sequence)
            self.waiting.appendleft(sequence)
        self.blocks.forget_all()

    def depart(self, sequence: Sequence) -> None:
        """Let a sequence go, with all it holds."""
        del self._by_id[sequence.request.request_id]
        if sequence.slot == NO_SLOT:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._release(sequence)
        self._departed(sequence)

    def end(self, sequence: Sequence, finish_reason: str, error: str | None = None) -> TokenOutput:
        """End a sequence from outside; return its last output."""
        sequence.finish_reason = finish_reason
        sequence.error = error
        self.depart(sequence)
        return sequence.report()

    def _release(self, sequence: Sequence) -> None:
        self.blocks.free(sequence.block_ids)
        self._slots.append(sequence.slot)
        sequence.leave_workers()

    def check_integrity(self) -> None:
        """Check blocks, slots and queues against each other.

        Raises:
            RuntimeError: says where they disagree.
        """
        self.blocks.check_integrity([sequence.block_ids for sequence in self._by_id.values()])
        slots = sorted([*self._slots, *(sequence.slot for sequence in self.running)])
        if slots != list(range(self._num_slots)):
            raise RuntimeError(f"slots {slots} are not each of {self._num_slots} once")
        if [*self.running, *self.waiting] != self.everyone():
            raise RuntimeError("running and waiting sequences are not all the known ones in order of arrival")
