"""The recurrent states that workers keep at block boundaries for the prefix cache: which of them hold what.

A model with recurrent layers can begin after a cached prefix only where its state is kept, too. States are few, since
each takes as much memory as many blocks: of a prompt those at its last block boundary and where it leaves an earlier
prompt are kept, and of a running sequence one that moves with it.
"""

from collections.abc import Iterable

Node = int
"""The node of the prefix cache that ends at the boundary. See `runtime.core.block_manager.Chain`."""


class PrefixStates:
    """Numbers 0 .. num_states - 1, each free, reserved for a row that runs, or kept for a node.

    The least recently used of the kept states is given to the next row that wants one.
    """

    def __init__(self, num_states: int) -> None:
        self._num_states = num_states
        self._reserved: set[int] = set()
        self._resumed: set[Node] = set()  # of the nodes in `_kept`, those after which a sequence began
        self._kept: dict[Node, int] = {}  # the least recently used first
        self._free = list(range(num_states))

    def __contains__(self, node: object) -> bool:
        """Whether a state is kept for a node."""
        return node in self._kept

    @property
    def num_kept(self) -> int:
        """How many states are kept."""
        return len(self._kept)

    def reserve(self) -> int | None:
        """Return a state for a row to write; None if all are reserved."""
        if not self._free and self._kept:
            self.drop(next(iter(self._kept)))
        if not self._free:
            return None
        state = self._free.pop()
        self._reserved.add(state)
        return state

    def keep(self, node: Node, state: int) -> bool:
        """Keep a reserved state, now written, for *node*, which is published; False: it has one, which is as good."""
        if node in self._kept:
            return False
        self._reserved.remove(state)
        self._kept[node] = state
        return True

    def settle(self, states: Iterable[int]) -> None:
        """Free those of *states* that are still reserved: their row has run, and they were not kept."""
        for state in states:
            if state in self._reserved:
                self._reserved.remove(state)
                self._free.append(state)

    def resume(self, node: Node) -> int:
        """Return the state kept for *node*, after which a sequence begins."""
        state = self._kept[node] = self._kept.pop(node)
        self._resumed.add(node)
        return state

    def supersede(self, node: Node) -> None:
        """Free the state of *node*, whose sequence has kept a later one, unless another began after it."""
        if node not in self._resumed:
            self.drop(node)

    def drop(self, node: Node) -> None:
        """Free the state of *node*, if there is one."""
        state = self._kept.pop(node, None)
        self._resumed.discard(node)
        if state is not None:
            self._free.append(state)

    def resize(self, num_states: int) -> None:
        """Use states 0 .. num_states - 1 from now on, those of new workers, all free."""
        self._num_states = num_states
        self.forget_all()

    def forget_all(self) -> None:
        """Free all states, those of rows that run, too: the workers that had them are lost."""
        self._kept.clear()
        self._resumed.clear()
        self._reserved.clear()
        self._free = list(range(self._num_states))

    def check_integrity(self, published: Iterable[Node]) -> None:
        """Check that each state is in one place, and that only published nodes have one. Raises `RuntimeError`."""
        states = sorted([*self._free, *self._reserved, *self._kept.values()])
        if states != list(range(self._num_states)):
            raise RuntimeError(f"states {states} are not each of {self._num_states} once")
        if not self._resumed <= self._kept.keys() <= set(published):
            raise RuntimeError("states are kept for nodes that are not published")
