"""Merges several continuations of a text into a draft: the most frequent chain, or the best nodes of their tree.

A node's probability is the share of all occurrences of the text whose continuation contains it; occurrences with a
shorter continuation, or with none, count as others.
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
Merge = Callable[[Continuations, int, int, float], ScoredDraft]

CASCADE_MIN_SCORE = {"suffix": 1.0, "rest": 2.0}
"""In a cascade, drafts of a method with a lower score are left to the next method."""


def min_score(config: SpeculativeConfig, method: str) -> float:
    """Return the least score of a draft of *method*: 0 unless other methods follow in the cascade."""
    return CASCADE_MIN_SCORE[method] if method in config.methods[:-1] else 0.0


def chain(texts: Continuations, total: int, count: int, min_probability: float) -> ScoredDraft:
    """Follow the most frequent token at each step, for *count* tokens at most.

    Args:
        texts: the continuations, most recent first; the most recent wins among equally frequent tokens.
        total: number of occurrences, those without a continuation in *texts* included.
        count: most tokens of the draft.
        min_probability: the chain ends before the first token with a lower probability.
    """
    drafted: list[int] = []
    score, alive, fewest = 0, texts, max(1.0, min_probability * total)
    if count == 1:  # most drafts are after matches of one token
        token, frequency = _most_frequent([text[0] for text in texts if text])
        return ScoredDraft(Draft((token,)), frequency / total) if frequency >= fewest else NO_SCORED_DRAFT
    while len(alive) > 1 and len(drafted) < count:
        depth = len(drafted)
        tokens = [text[depth] for text in alive if depth < len(text)]
        token, frequency = _most_frequent(tokens)
        if frequency < fewest:
            break
        drafted.append(token)
        score += frequency
        if frequency < len(alive) and len(drafted) < count:
            alive = [text for text in alive if depth < len(text) and text[depth] == token]
    if len(alive) == 1 and fewest <= 1:  # follow the only continuation left
        last = alive[0][len(drafted) : count]
        drafted += last
        score += len(last)
    return ScoredDraft(Draft(tuple(drafted)), score / total)


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


def tree(texts: Continuations, total: int, count: int, min_probability: float) -> ScoredDraft:
    """Return a tree of the most likely nodes of all *texts*, at most *count*; a chain if it has no branches.

    No child is more likely than its parent. Equally likely nodes are taken in the order in which they are reached.
    Arguments as for `chain`.
    """
    if len(texts) == 1 or count == 1:
        return chain(texts, total, count, min_probability)
    tokens: list[int] = []
    parents: list[int] = []
    score = 0
    # Nodes whose parents are drafted, by frequency: token, parent, depth, and the texts that contain them.
    reached: list[list[tuple[int, int, int, Continuations]]] = [[] for _ in range(len(texts) + 1)]
    for token, group in _groups(texts, 0):
        reached[len(group)].append((token, -1, 1, group))
    for frequency in range(len(texts), max(1, ceil(min_probability * total)) - 1, -1):
        nodes = reached[frequency]
        for i, (token, parent, depth, group) in enumerate(nodes):  # the list grows meanwhile
            if len(tokens) == count:
                break
            if len(nodes) - i < count - len(tokens):  # else these nodes complete the draft
                for after, those in _groups(group, depth):
                    reached[len(those)].append((after, len(tokens), depth + 1, those))
            tokens.append(token)
            parents.append(parent)
            score += frequency
    is_chain = parents == list(range(-1, len(tokens) - 1))
    return ScoredDraft(Draft(tuple(tokens), () if is_chain else tuple(parents)), score / total)
