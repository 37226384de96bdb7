"""What several texts that went on from here say together: the most likely chain, or the best nodes of their tree.

A node's probability is the share of all texts that go through it; texts that end before count as saying something else.
The expected number of accepted tokens of a draft is the sum of its nodes' probabilities.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from math import ceil
from typing import NamedTuple

from protos.config.engine import SpeculativeConfig
from protos.draft import Draft

Texts = Seq[Seq[int]]


class Guess(NamedTuple):
    """A draft, and how many of its tokens are expected to be accepted."""

    draft: Draft
    score: float


NO_GUESS = Guess(Draft(()), 0.0)
Vote = Callable[[Texts, int, float], Guess]

CONFIDENT = 2.0
"""Where others are asked behind it, a guess is confident that expects so many tokens to be accepted."""


def confidence_of(config: SpeculativeConfig, method: str) -> float:
    """Return how many tokens a guess of *method* has to expect to be accepted; alone or asked last, any is made."""
    return CONFIDENT if method in config.methods[:-1] else 0.0


def chain(texts: Texts, count: int, min_probability: float) -> Guess:
    """Follow the most frequent token at each step, for *count* tokens at most.

    Args:
        texts: what went on from here, most recent first, which wins where tokens are equally frequent.
        count: tokens wanted.
        min_probability: tokens less likely than this are left out, and with them all behind them.
    """
    followed: list[int] = []
    num_votes, alive, fewest = 0, texts, max(1.0, min_probability * len(texts))
    while len(alive) > 1 and len(followed) < count:
        depth = len(followed)
        said = [text[depth] for text in alive if depth < len(text)]
        token, votes = _most_frequent(said)
        if votes < fewest:
            break
        if votes < len(alive):
            alive = [text for text in alive if depth < len(text) and text[depth] == token]
        followed.append(token)
        num_votes += votes
    if len(alive) == 1 and fewest <= 1:  # nobody is left to contradict
        last = alive[0][len(followed) : count]
        followed += last
        num_votes += len(last)
    return Guess(Draft(tuple(followed)), num_votes / len(texts))


def _most_frequent(said: list[int]) -> tuple[int, int]:
    """Return the token that is said most often, the first of several, and how often."""
    if not said:
        return -1, 0
    votes = said.count(said[0])
    if votes == len(said):
        return said[0], votes
    token = max(dict.fromkeys(said), key=said.count)
    return token, said.count(token)


def _groups(texts: Texts, depth: int) -> Iterable[tuple[int, Texts]]:
    """Return the texts by what they have at *depth*, in order of first appearance."""
    if len(texts) == 1:
        return ((texts[0][depth], texts),) if depth < len(texts[0]) else ()
    groups: dict[int, list[Seq[int]]] = {}
    for text in texts:
        if depth < len(text):
            groups.setdefault(text[depth], []).append(text)
    return groups.items()


def tree(texts: Texts, count: int, min_probability: float) -> Guess:
    """Return the *count* likeliest nodes, at most, of the tree of all *texts*; a chain where it has no branches.

    Equally likely nodes are taken in the order in which they can be reached: no child is likelier than its parent.
    Arguments as for `chain`.
    """
    if len(texts) == 1:
        return chain(texts, count, min_probability)
    tokens: list[int] = []
    parents: list[int] = []
    num_votes = 0
    # By how many texts go through them, nodes that can be reached: token, parent, depth and these texts.
    reached: list[list[tuple[int, int, int, Texts]]] = [[] for _ in range(len(texts) + 1)]
    for token, group in _groups(texts, 0):
        reached[len(group)].append((token, -1, 1, group))
    for votes in range(len(texts), max(1, ceil(min_probability * len(texts))) - 1, -1):
        nodes = reached[votes]
        for i, (token, parent, depth, group) in enumerate(nodes):  # which grow meanwhile
            if len(tokens) == count:
                break
            if len(nodes) - i < count - len(tokens):  # else the nodes here are all that are wanted
                for after, those in _groups(group, depth):
                    reached[len(those)].append((after, len(tokens), depth + 1, those))
            tokens.append(token)
            parents.append(parent)
            num_votes += votes
    is_chain = parents == list(range(-1, len(tokens) - 1))
    return Guess(Draft(tuple(tokens), () if is_chain else tuple(parents)), num_votes / len(texts))
