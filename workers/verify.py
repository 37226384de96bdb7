"""Acceptance by sample and match: follow the draft while it says what the target itself chose.

The target's ordinary sampler has already chosen a token y behind every scored position (`workers.sampler`), with
noise that does not depend on the draft. So whatever is accepted, the emitted tokens are the target's own; the draft
only decides how many of them one round yields. DESIGN section 5.
"""

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from protos.messages import Draft

Ints = npt.NDArray[np.int64]


def accept_chains(y_N: Ints, draft_RK: Ints, k_R: Ints) -> Ints:
    """Return int64 `[R]`: how many draft tokens of each row are accepted, `0 .. k_R[r]`.

    Args:
        y_N: the target's choices, row after row: row r has `k_R[r] + 1` of them, the j-th chosen where the
            j-th draft token stands, the last one behind the whole draft. -1 where no token could be chosen.
            Row r emits the first `accepted + 1` of its choices.
        draft_RK: drafted ids, row r valid in its first `k_R[r]` columns.
        k_R: draft lengths, `0 .. K`.
    """
    columns_K = np.arange(draft_RK.shape[1])
    in_draft_RK = columns_K < k_R[:, None]
    first_R = np.cumsum(k_R + 1) - (k_R + 1)
    y_RK = np.take(y_N, first_R[:, None] + columns_K, mode="clip")
    match_RK = (y_RK == draft_RK) & in_draft_RK
    accepted_R: Ints = np.logical_and.accumulate(match_RK, axis=1).sum(axis=1, dtype=np.int64)
    return accepted_R


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
