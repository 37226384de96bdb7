"""Suffix decoding as its authors describe it, by counting: the reference for `suffix`.

Oliaro et al. 2024, and arctic-inference's `SuffixDecodingCache`. A tree holds every run of at most `depth` tokens of
its texts, with the number of its occurrences. For each length of a match, the draft follows the most frequent next
token. A token's probability is the number of occurrences of match and draft up to it, divided by that of the match; the
score is the sum of probabilities. The draft with the highest score wins.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class ReferenceDraft(NamedTuple):
    tokens: tuple[int, ...]
    score: float


class CountedTree:
    """Counts of all runs of at most *depth* tokens."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.after: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        self.count: Counter[tuple[int, ...]] = Counter()

    def append(self, text: list[int], token: int) -> None:
        text.append(token)
        for start in range(max(0, len(text) - self.depth), len(text)):
            run = tuple(text[start:])
            self.count[run] += 1
            self.after[run[:-1]][token] += 1

    def speculate(self, pattern: Sequence[int], k: int, least: float) -> ReferenceDraft:
        best = ReferenceDraft((), 0.0)
        for length in range(1, len(pattern)):
            match = tuple(pattern[-length:])
            if match not in self.count:
                break
            draft = self._follow(match, min(k, length), least)
            best = draft if draft.score >= best.score else best
        return best

    def _follow(self, match: tuple[int, ...], count: int, least: float) -> ReferenceDraft:
        run, score = match, 0.0
        while len(run) < len(match) + count and self.after[run]:
            token, frequency = self.after[run].most_common(1)[0]
            if frequency / self.count[match] < least:
                break
            run += (token,)
            score += frequency / self.count[match]
        return ReferenceDraft(run[len(match) :], score)


class SuffixReference:
    """The authors' cache: a tree of prompt and answer for each request, and one of all answers, running ones too."""

    def __init__(self, k: int, depth: int = 24, least: float = 0.1) -> None:
        self.k, self.depth, self.least = k, depth, least
        self.answers = CountedTree(depth)
        self.own: dict[int, tuple[CountedTree, list[int], list[int]]] = {}

    def begin(self, key: int, prompt: list[int]) -> None:
        self.own[key] = CountedTree(self.depth), [], []
        for token in prompt:
            self.own[key][0].append(self.own[key][1], token)

    def grow(self, key: int, tokens: Sequence[int]) -> None:
        tree, text, answer = self.own[key]
        for token in tokens:
            tree.append(text, token)
            self.answers.append(answer, token)

    def propose(self, key: int) -> tuple[int, ...]:
        tree, text, _ = self.own[key]
        pattern = text[-self.depth :]
        own, past = (one.speculate(pattern, self.k, self.least) for one in (tree, self.answers))
        return past.tokens if past.score > own.score else own.tokens


def continuations(text: list[int], match: list[int]) -> list[list[int]]:
    """Return what follows each occurrence of *match*; nothing follows the end of the text."""
    size = len(match)
    return [text[end:] for end in range(size, len(text) + 1) if text[end - size : end] == match]


def possible_drafts(after: list[list[int]], total: int, count: int, least: float) -> Iterator[ReferenceDraft]:
    """Yield the drafts of a match with *total* occurrences: one for each choice among equally frequent tokens."""

    def follow(draft: tuple[int, ...], score: float) -> Iterator[ReferenceDraft]:
        depth = len(draft)
        alive = [text for text in after if tuple(text[:depth]) == draft and len(text) > depth]
        votes = Counter(text[depth] for text in alive)
        most = max(votes.values(), default=0)
        if depth == count or not most or most / total < least:
            yield ReferenceDraft(draft, score)
            return
        for token, number in votes.items():
            if number == most:
                yield from follow((*draft, token), score + most / total)

    yield from follow((), 0.0)
