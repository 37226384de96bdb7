"""Acceptance by sample and match: follow the draft while it says what the target itself chose.

The target's ordinary sampler has already chosen a token y behind every scored position (`workers.sampler`), with
noise that does not depend on the draft. So whatever is accepted, the emitted tokens are the target's own; the draft
only decides how many of them one round yields. DESIGN section 5.
"""

from collections.abc import Sequence as Seq

from protos.messages import Draft


def accept(draft: Draft, y: Seq[int]) -> list[int]:
    """Return the accepted nodes of *draft* from the root down; for a chain that is `0 .. accepted - 1`.

    Walks from the root to the child equal to the target's choice, as far as there is one; probes are never entered.

    Args:
        draft: nodes in topological order.
        y: the target's choices, `len(draft) + 1` of them: `y[0]` behind the root, `y[1 + i]` behind node i; -1
            where no token could be chosen. The row emits `y[0]` and `y[1 + i]` for every i on the path.
    """
    if draft.is_chain and not draft.probes:
        return list(range(_common_start(draft.tokens, y)))
    children = _children(draft)
    path: list[int] = []
    node = children.get((-1, y[0]))
    while node is not None:
        path.append(node)
        node = children.get((node, y[1 + node]))
    return path


def _common_start(draft: Seq[int], y: Seq[int]) -> int:
    """Return how many leading drafted tokens are the target's choices."""
    for count, (guess, choice) in enumerate(zip(draft, y, strict=False)):
        if guess != choice:
            return count
    return len(draft)


def _children(draft: Draft) -> dict[tuple[int, int], int]:
    """Map (parent, token) to the first such node that may be accepted."""
    parents = draft.parents or range(-1, len(draft) - 1)
    probes = draft.probes or (False,) * len(draft)
    children: dict[tuple[int, int], int] = {}
    for node, (parent, token, probe) in enumerate(zip(parents, draft.tokens, probes, strict=True)):
        if not probe:
            children.setdefault((parent, token), node)
    return children
