"""Which recurrent states of sequences are kept for the prefix cache, and which of them sequences begin with."""

from protos.messages import Row
from runtime.core.block_manager import BlockManager
from runtime.core.prefix_states import PrefixStates
from runtime.core.sequence import ScheduledSequence, Sequence


class StateKeeping:
    """Decides after which block boundaries of a sequence its recurrent state is kept.

    These are the last one of its prompt, for requests that continue it; the one where it leaves what is cached, for
    requests that share as much; and one that moves with the sequence, for itself after preemption, and for requests
    that continue its output.

    Args:
        blocks: the blocks.
        states: the numbers of the states.
        lag: how many blocks before the end of a cached prefix a sequence begins, for the draft's sake.
    """

    def __init__(self, blocks: BlockManager, states: PrefixStates, lag: int) -> None:
        self._blocks, self._states, self._lag = blocks, states, lag

    def begin(self, sequence: Sequence, num_found: int) -> None:
        """Have a sequence begin with the state of its chain; *num_found* blocks of its tokens are cached."""
        if sequence.block_ids:
            assert isinstance(sequence.chain, int), "the chain of blocks is a node"
            sequence.state_from = self._states.resume(sequence.chain)
        size = self._blocks.block_size
        last = (len(sequence.request.prompt_token_ids) - 1) // size - self._lag
        sequence.state_ends = tuple(sorted({last * size, num_found * size}))

    def reserve(self, one: ScheduledSequence) -> list[int]:
        """Return `Row.states_to`: the boundaries after which a row keeps its state, each with the state's number."""
        states_to: list[int] = []
        for end in self._ends(one):
            state = self._states.reserve()
            if state is not None:
                states_to += end, state
        return states_to

    def _ends(self, one: ScheduledSequence) -> list[int]:
        """Return the boundaries that a row reaches: the sequence's own, and the one that moves.

        That is the last one in a chunk, or the first among the newest token and the draft's.
        """
        start, size = one.sequence.num_computed, self._blocks.block_size
        ends = [end for end in one.sequence.state_ends if start < end <= one.end]
        moving = (one.end + (size - 1 if one.samples else 0)) // size * size
        if start < moving <= one.end + one.k and moving not in ends:
            ends.append(moving)
        return ends

    def keep(self, sequence: Sequence, end: int, row: Row) -> None:
        """Keep the state after the boundary *end* for the sequence's chain, if its row has written one."""
        states_to = dict(zip(row.states_to[::2], row.states_to[1::2], strict=True))
        if end not in states_to:
            return
        node = sequence.chain
        assert isinstance(node, int), "the chain of blocks is a node"
        is_own = self._states.keep(node, states_to[end])
        if sequence.moving_state is not None:
            self._states.supersede(sequence.moving_state)
        sequence.moving_state = node if is_own and end not in sequence.state_ends else None

    def settle(self, row: Row) -> None:
        """Free the states of a committed row that were not kept: the tokens before them were rejected."""
        self._states.settle(row.states_to[1::2])
