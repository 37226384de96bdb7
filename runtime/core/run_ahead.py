"""Which steps are followed by one that the workers may begin before its plan comes (`RoundPlan.continues`).

It has the same rows, each with the one token that it gets in this step, and no drafts: all that the workers need, but
for a place in the KV cache. Requests that come meanwhile start in the step after it.
"""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple

from runtime.core.sequence import ScheduledSequence, Sequence

if TYPE_CHECKING:
    from runtime.core.request_queue import RequestQueue


class FailedStart(NamedTuple):
    """The first sequence that waits could not start: its key, and how many blocks were free beside one for each row."""

    key: int = 0
    num_spare: int = 0

    @classmethod
    def of(cls, queue: "RequestQueue") -> "FailedStart":
        """Return that of the first sequence that waits."""
        return cls(queue.waiting[0].key, queue.blocks.num_free - len(queue.running))

    def holds(self, queue: "RequestQueue") -> bool:
        """Whether the first that waits fails to start now, too: it is the same one, and no more blocks are free."""
        now = self.of(queue)
        return now.key == self.key and now.num_spare <= self.num_spare


def continues(scheduled: Seq[ScheduledSequence], queue: "RequestQueue", last: FailedStart) -> bool:
    """Return whether the rows of a planned step go on as they are in the next one; give them the blocks for it.

    Not if a request waits that could start then; *last* is the newest that could not.
    """
    if any(one.k or one.length != 1 or not one.samples or one.sequence.needs_host for one in scheduled):
        return False
    staying = [one.sequence for one in scheduled if len(one.sequence.token_ids) + 1 < one.sequence.max_len]
    if not staying or (queue.waiting and (len(staying) < len(scheduled) or _may_start(queue, last))):
        return False
    return _give_places(staying, queue)


def _may_start(queue: "RequestQueue", last: FailedStart) -> bool:
    """Whether the first sequence that waits may start although no other ends."""
    return queue.has_slot and not last.holds(queue)


def _give_places(staying: list[Sequence], queue: "RequestQueue") -> bool:
    """Give each sequence a place for its next token; return whether there are enough blocks."""
    blocks = queue.blocks
    full = [one for one in staying if len(one.token_ids) == len(one.block_ids) * blocks.block_size]
    if len(full) > blocks.num_free:
        return False
    for sequence in full:
        sequence.block_ids += blocks.allocate(1)
    return True
