"""Which steps are followed by one that the workers may begin before its plan comes (`RoundPlan.continues`).

It has the same rows, each with the one token that it gets in this step, and no drafts: all that the workers need, but
for a place in the KV cache. Requests that come meanwhile start in the step after it.
"""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from runtime.core.sequence import ScheduledSequence, Sequence

if TYPE_CHECKING:
    from runtime.core.request_queue import RequestQueue


def continues(scheduled: Seq[ScheduledSequence], queue: "RequestQueue") -> bool:
    """Return whether the rows of a planned step go on as they are in the next one; give them the blocks for it.

    Not if a request waits that could start then.
    """
    if any(one.k or one.length != 1 or not one.samples for one in scheduled):
        return False
    staying = [one.sequence for one in scheduled if len(one.sequence.token_ids) + 1 < one.sequence.max_len]
    may_start = queue.waiting and (queue.has_slot or len(staying) < len(scheduled))
    return bool(staying) and not may_start and _give_places(staying, queue)


def _give_places(staying: list[Sequence], queue: "RequestQueue") -> bool:
    """Give each sequence a place for its next token; return whether there are enough blocks."""
    blocks = queue.blocks
    full = [one for one in staying if len(one.token_ids) == len(one.block_ids) * blocks.block_size]
    if len(full) > blocks.num_free:
        return False
    for sequence in full:
        sequence.block_ids += blocks.allocate(1)
    return True
