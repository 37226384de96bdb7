"""Acceptance by sample and match: follow the draft while it says what the target itself chose.

The target's ordinary sampler has already chosen a token y behind every scored position (`workers.sampling.sampler`),
with
noise that does not depend on the draft. So whatever is accepted, the emitted tokens are the target's own; the draft
only decides how many of them one round yields. DESIGN section 5.
"""

from collections.abc import Sequence as Seq

from protos.draft import Draft


class Walk:
    """One draft, followed from the root along the target's choices. Probes are never entered.

    Attributes:
        path: nodes entered so far.
    """

    def __init__(self, draft: Draft) -> None:
        self._children = _children(draft)
        self.path: list[int] = []

    @property
    def node(self) -> int:
        """Where it stands; -1 at the root."""
        return self.path[-1] if self.path else -1

    def take(self, y: int) -> bool:
        """Go to the child that equals *y*, the target's choice behind `node`; False where there is none."""
        child = self._children.get((self.node, y))
        if child is not None:
            self.path.append(child)
        return child is not None


def accept(draft: Draft, y: Seq[int]) -> list[int]:
    """Return the accepted nodes of *draft* from the root down; for a chain that is `0 .. accepted - 1`.

    Walks from the root to the child equal to the target's choice, as far as there is one.

    Args:
        draft: nodes in topological order.
        y: the target's choices, `len(draft) + 1` of them: `y[0]` behind the root, `y[1 + i]` behind node i; -1
            where no token could be chosen. The row emits `y[0]` and `y[1 + i]` for every i on the path.
    """
    if draft.is_chain and not draft.probes:
        return list(range(_common_start(draft.tokens, y)))
    walk = Walk(draft)
    while walk.take(y[1 + walk.node]):
        pass
    return walk.path


def _common_start(draft: Seq[int], y: Seq[int]) -> int:
    """Return how many leading drafted tokens are the target's choices."""
    for count, (guess, choice) in enumerate(zip(draft, y, strict=False)):
        if guess != choice:
            return count
    return len(draft)


def _children(draft: Draft) -> dict[tuple[int, int], int]:
    """Map (parent, token) to the first such node that may be accepted."""
    parents = draft.node_parents()
    probes = draft.probes or (False,) * len(draft)
    children: dict[tuple[int, int], int] = {}
    for node, (parent, token, probe) in enumerate(zip(parents, draft.tokens, probes, strict=True)):
        if not probe:
            children.setdefault((parent, token), node)
    return children
