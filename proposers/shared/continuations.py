"""Merges several continuations of a text into a draft: the most frequent chain, or the best nodes of their tree.

A node's probability is the share of all continuations that contain it; continuations that end before count as others.
A draft's score is the sum of its nodes' probabilities: the expected number of accepted tokens.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from math import ceil
from typing import NamedTuple

from protos.config.engine import SpeculativeConfig
from protos.draft import NO_DRAFT, Draft

Continuations = Seq[Seq[int]]


class ScoredDraft(NamedTuple):
    """A draft, and the expected number of accepted tokens."""

    draft: Draft
    score: float


NO_SCORED_DRAFT = ScoredDraft(NO_DRAFT, 0.0)
Merge = Callable[[Continuations, int, float], ScoredDraft]

CASCADE_MIN_SCORE = 2.0
"""In a cascade, drafts with a lower score are left to the next method."""


def min_score(config: SpeculativeConfig, method: str) -> float:
    """Return the least score of a draft of *method*: 0 unless other methods follow in the cascade."""
    return CASCADE_MIN_SCORE if method in config.methods[:-1] else 0.0


def chain(texts: Continuations, count: int, min_probability: float) -> ScoredDraft:
    """Follow the most frequent token at each step, for *count* tokens at most.

    Args:
        texts: the continuations, most recent first; the most recent wins among equally frequent tokens.
        count: most tokens of the draft.
        min_probability: the chain ends before the first token with a lower probability.
    """
    drafted: list[int] = []
    total, alive, fewest = 0, texts, max(1.0, min_probability * len(texts))
    while len(alive) > 1 and len(drafted) < count:
        depth = len(drafted)
        tokens = [text[depth] for text in alive if depth < len(text)]
        token, frequency = _most_frequent(tokens)
        if frequency < fewest:
            break
        if frequency < len(alive):
            alive = [text for text in alive if depth < len(text) and text[depth] == token]
        drafted.append(token)
        total += frequency
    if len(alive) == 1 and fewest <= 1:  # follow the only continuation left
        last = alive[0][len(drafted) : count]
        drafted += last
        total += len(last)
    return ScoredDraft(Draft(tuple(drafted)), total / len(texts))


def _most_frequent(tokens: list[int]) -> tuple[int, int]:
    """Return the most frequent token, the first of several, and how often it occurs."""
    if not tokens:
        return -1, 0
    frequency = tokens.count(tokens[0])
    if frequency == len(tokens):
        return tokens[0], frequency
    token = max(dict.fromkeys(tokens), key=tokens.count)
    return token, tokens.count(token)


def _groups(texts: Continuations, depth: int) -> Iterable[tuple[int, Continuations]]:
    """Group the texts by their token at *depth*, in order of first appearance."""
    if len(texts) == 1:
        return ((texts[0][depth], texts),) if depth < len(texts[0]) else ()
    groups: dict[int, list[Seq[int]]] = {}
    for text in texts:
        if depth < len(text):
            groups.setdefault(text[depth], []).append(text)
    return groups.items()


def tree(texts: Continuations, count: int, min_probability: float) -> ScoredDraft:
    """Return a tree of the most likely nodes of all *texts*, at most *count*; a chain if it has no branches.

    No child is more likely than its parent. Equally likely nodes are taken in the order in which they are reached.
    Arguments as for `chain`.
    """
    if len(texts) == 1:
        return chain(texts, count, min_probability)
    tokens: list[int] = []
    parents: list[int] = []
    total = 0
    # Nodes whose parents are drafted, by frequency: token, parent, depth, and the texts that contain them.
    reached: list[list[tuple[int, int, int, Continuations]]] = [[] for _ in range(len(texts) + 1)]
    for token, group in _groups(texts, 0):
        reached[len(group)].append((token, -1, 1, group))
    for frequency in range(len(texts), max(1, ceil(min_probability * len(texts))) - 1, -1):
        nodes = reached[frequency]
        for i, (token, parent, depth, group) in enumerate(nodes):  # the list grows meanwhile
            if len(tokens) == count:
                break
            if len(nodes) - i < count - len(tokens):  # else these nodes complete the draft
                for after, those in _groups(group, depth):
                    reached[len(those)].append((after, len(tokens), depth + 1, those))
            tokens.append(token)
            parents.append(parent)
            total += frequency
    is_chain = parents == list(range(-1, len(tokens) - 1))
    return ScoredDraft(Draft(tuple(tokens), () if is_chain else tuple(parents)), total / len(texts))
