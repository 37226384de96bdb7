"""Drafts: chains and trees of draft tokens, and the rows they are wanted for."""

from collections.abc import Sequence as Seq

import msgspec

ANY_DEPTH = 1 << 30
"""No limit on the depth of a draft."""
PREDICTION = 0
"""`Row.source` of drafts of what the user predicts, where drafts are made in the controller process at all."""
ANY_ROOM = 1 << 30
"""No limit on the draft tokens that are fed to the draft."""


class DraftRow(msgspec.Struct, frozen=True, gc=False):
    """One sequence that wants a draft of at most `k` tokens, in at most `depth` levels, after its `token_ids`.

    Attributes:
        slot: the sequence's place in the draft worker's tables, which learned proposers read.
        k: most nodes of the draft.
        token_ids: prompt and output, read-only; given only to proposers in the controller process.
        key: the sequence's key in the calls of a `SequenceListener`; 0 if none was announced.
        depth: most levels of nodes that may be accepted; probes may be deeper. A draft may have more nodes than that.
        room: how many draft tokens the draft's KV cache has places for, at least `max_chain`. A dynamic tree feeds more
            nodes than it keeps.
    """

    slot: int
    k: int
    token_ids: Seq[int] = ()
    key: int = 0
    depth: int = ANY_DEPTH
    room: int = ANY_ROOM

    @property
    def max_chain(self) -> int:
        """Most tokens of a chain: each is a level of its own."""
        return min(self.k, self.depth)


class Draft(msgspec.Struct, frozen=True, gc=False):
    """Draft tokens: the nodes of a tree in topological order.

    Attributes:
        tokens: the token id of each node.
        parents: index of each node's parent, -1 for the root (the last known token). Empty for a chain: each token
            follows the one before.
        probes: marks nodes for which the target's next token is wanted, but which are never accepted. Empty: none.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...] = ()
    probes: tuple[bool, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether each token follows the one before."""
        return not self.parents

    def valid_prefix(self, k: int, vocab_size: int) -> "Draft":
        """Return the nodes before the first invalid one, at most *k*, in the normal form of `first`.

        A node is valid if its id is below *vocab_size* and its parent comes before it. A draft whose tokens, parents
        and probes differ in number has no valid node.
        """
        tokens, size = self.tokens, len(self.tokens)
        if tokens and not (self.parents or self.probes) and min(tokens) >= 0 and max(tokens) < vocab_size:
            return self if size <= k else Draft(tokens[:k])
        if len(self.parents) not in {0, size} or len(self.probes) not in {0, size}:
            return NO_DRAFT
        return self.first(min(k, self._num_valid(vocab_size)))

    def _num_valid(self, vocab_size: int) -> int:
        """Return how many nodes come before the first invalid one."""
        for node, (token, parent) in enumerate(zip(self.tokens, self.node_parents(), strict=True)):
            if not (0 <= token < vocab_size and -1 <= parent < node):
                return node
        return len(self)

    def first(self, k: int) -> "Draft":
        """Return the first *k* nodes, which form a tree because parents come before children.

        In normal form: `parents` is empty for a chain, unless it has probes. So a draft that `is_chain` has no probes.
        """
        cut = self if len(self) <= k else Draft(self.tokens[:k], self.parents[:k], self.probes[:k])
        if cut.is_chain and not cut.probes:
            return cut
        probes, parents = cut.probes if any(cut.probes) else (), tuple(cut.node_parents())
        is_straight = parents == tuple(range(-1, len(cut) - 1))
        return Draft(cut.tokens) if is_straight and not probes else Draft(cut.tokens, parents, probes)

    def straight_prefix(self) -> "Draft":
        """Return the first nodes, as far as each follows the one before and none is a probe."""
        flags = self.probes or (False,) * len(self)
        for node, (parent, is_probe) in enumerate(zip(self.node_parents(), flags, strict=True)):
            if parent != node - 1 or is_probe:
                return Draft(self.tokens[:node])
        return Draft(self.tokens)

    def within(self, depth: int) -> "Draft":
        """Return the nodes of the first *depth* levels, and the probes below them, in the normal form of `first`."""
        if len(self.tokens) <= depth:  # whatever its shape
            return self
        depths = self.depths()
        if max(depths, default=0) <= depth:
            return self
        probed, parents = self._probed(), self.node_parents()
        place = {-1: -1}  # of the nodes that are kept
        for node, parent in enumerate(parents):
            if parent in place and (depths[node] <= depth or probed[node]):
                place[node] = len(place) - 1
        kept = list(place)[1:]
        cut = Draft(
            tuple(self.tokens[node] for node in kept),
            tuple(place[parents[node]] for node in kept),
            tuple(self.probes[node] for node in kept) if self.probes else (),
        )
        return cut.first(len(kept))

    def acceptable_nodes(self) -> list[int]:
        """Return the nodes that may be accepted: all but probes, and nodes below them."""
        return [node for node, probed in enumerate(self._probed()) if not probed]

    def _probed(self) -> list[bool]:
        """Return for every node whether it is a probe or descends from one: it cannot be accepted."""
        probes = sum(1 << node for node, is_probe in enumerate(self.probes) if is_probe)
        return [bool(mask & probes) for mask in self.ancestor_masks()]

    def node_parents(self) -> Seq[int]:
        """Return the parent of every node, for chains as well."""
        return self.parents or range(-1, len(self) - 1)

    def depths(self) -> list[int]:
        """Return the depth of every node: 1 for children of the root."""
        found: list[int] = []
        for parent in self.node_parents():
            found.append(1 if parent < 0 else found[parent] + 1)
        return found

    def ancestor_masks(self) -> list[int]:
        """Return a bit mask for every node: bit j is set if node j is an ancestor of it, or the node itself."""
        found: list[int] = []
        for node, parent in enumerate(self.node_parents()):
            found.append(1 << node | (0 if parent < 0 else found[parent]))
        return found

    def widths(self) -> list[int]:
        """Return the number of nodes at each depth, from 1 on, that can be accepted: no probe or descendant of one."""
        reachable = [depth for depth, probed in zip(self.depths(), self._probed(), strict=True) if not probed]
        counts = [0] * max(reachable, default=0)
        for depth in reachable:
            counts[depth - 1] += 1
        return counts


NO_DRAFT = Draft(())


class TreePath:
    """The path through a draft that follows the target's tokens. No probe is on it.

    Attributes:
        nodes: accepted so far, root to leaf.
    """

    def __init__(self, draft: Draft) -> None:
        self._children: dict[tuple[int, int], int] = {}  # the first node by (parent, token)
        probes = draft.probes or (False,) * len(draft)
        edges = zip(draft.node_parents(), draft.tokens, probes, strict=True)
        for node, (parent, token, is_probe) in enumerate(edges):
            if not is_probe:
                self._children.setdefault((parent, token), node)
        self.nodes: list[int] = []

    @property
    def end(self) -> int:
        """The path's last node; -1 for the root."""
        return self.nodes[-1] if self.nodes else -1

    def extend(self, token: int) -> bool:
        """Append the child of `end` that equals *token*; return whether there is one."""
        child = self._children.get((self.end, token))
        if child is not None:
            self.nodes.append(child)
        return child is not None
