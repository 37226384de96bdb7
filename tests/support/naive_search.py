"""Naive search for repeated n-grams, the reference for model-free proposers."""

from collections import Counter
from typing import Any

from hypothesis import strategies as st

from protos.messages import Request, Sampling
from protos.sampling import SamplingParams

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def request(prompt: list[int], **fields: Any) -> Request:
    return Request("r", tuple(prompt), SamplingParams(), Sampling(seed=0), 100, **fields)


def places_of(text: list[int], pattern: list[int], size: int) -> list[int]:
    """Return the position after each occurrence of *pattern*'s last *size* tokens in *text*, except at its end."""
    return [end for end in range(len(text) - 1, size - 1, -1) if text[end - size : end] == pattern[-size:]]


def naive_longest(text: list[int], pattern: list[int], smallest: int, reach: int) -> tuple[int, list[int]]:
    for size in range(min(reach, len(pattern)), smallest - 1, -1):
        if ends := places_of(text, pattern, size):
            return size, ends
    return 0, []


def naive_chain(texts: list[list[int]], total: int, count: int, least: float) -> tuple[tuple[int, ...], float]:
    tokens: list[int] = []
    score = 0.0
    while len(tokens) < count:
        going_on = [text[len(tokens)] for text in texts if text[: len(tokens)] == tokens and len(text) > len(tokens)]
        if not going_on:
            break
        token, votes_for = Counter(going_on).most_common(1)[0]  # ties go to the first seen, the most recent
        if votes_for / total < least:
            break
        tokens.append(token)
        score += votes_for / total
    return tuple(tokens), score
