"""Drafts as trees: what makes one well formed, and how its nodes hang together."""

from collections.abc import Sequence as Seq

from protos.messages import Draft

NO_DRAFT = Draft(())


def sane(draft: Draft, k: int, vocab_size: int) -> Draft:
    """Return what of *draft* can be scored: its nodes up to the first that makes no sense, at most *k*.

    A node makes sense if its id is one of the target's and its parent stands before it. Where ids, parents and probes
    are not equally many, nothing does. In the normal form of `first_of`.
    """
    size = len(draft)
    if len(draft.parents) not in {0, size} or len(draft.probes) not in {0, size}:
        return NO_DRAFT
    return first_of(draft, min(k, _num_valid(draft, vocab_size)))


def _num_valid(draft: Draft, vocab_size: int) -> int:
    """Return how many nodes come before the first that makes no sense."""
    for node, (token, parent) in enumerate(zip(draft.tokens, parents_of(draft), strict=True)):
        if not (0 <= token < vocab_size and -1 <= parent < node):
            return node
    return len(draft)


def first_of(draft: Draft, k: int) -> Draft:
    """Return the first *k* nodes of a draft; parents come before children, so they still hang together.

    What is a chain comes back without parents, and one with probes as a tree: so all that `is_chain` has no probes.
    """
    cut = draft if len(draft) <= k else Draft(draft.tokens[:k], draft.parents[:k], draft.probes[:k])
    if cut.is_chain and not cut.probes:
        return cut
    probes, parents = cut.probes if any(cut.probes) else (), tuple(parents_of(cut))
    is_straight = parents == tuple(range(-1, len(cut) - 1))
    return Draft(cut.tokens) if is_straight and not probes else Draft(cut.tokens, parents, probes)


def parents_of(draft: Draft) -> Seq[int]:
    """Return every node's parent, a chain's as well."""
    return draft.parents or range(-1, len(draft) - 1)


def depths(draft: Draft) -> list[int]:
    """Return how many nodes there are from the root to each, itself counted: 1 for the root's children."""
    found: list[int] = []
    for parent in parents_of(draft):
        found.append(1 if parent < 0 else found[parent] + 1)
    return found


def ancestors(draft: Draft) -> list[int]:
    """Return for each node a number of which bit j says whether node j is on the way to it, itself included."""
    found: list[int] = []
    for node, parent in enumerate(parents_of(draft)):
        found.append(1 << node | (0 if parent < 0 else found[parent]))
    return found


def widths(draft: Draft) -> list[int]:
    """Return how many nodes at each depth, from 1 on, could be accepted: no probes, and nothing behind one."""
    probes = sum(1 << node for node, is_probe in enumerate(draft.probes) if is_probe)
    reachable = [depth for depth, way in zip(depths(draft), ancestors(draft), strict=True) if not way & probes]
    counts = [0] * max(reachable, default=0)
    for depth in reachable:
        counts[depth - 1] += 1
    return counts
