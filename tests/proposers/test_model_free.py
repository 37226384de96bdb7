"""Indexes of model-free proposers equal a naive search."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proposers.shared import continuations as votes
from proposers.shared.answer_index import AnswerIndex, AnswerMatch
from proposers.shared.answer_ring import AnswerText
from proposers.shared.hash_chains import CHAIN
from proposers.shared.ngram_index import MAX_PLACES, Places
from proposers.shared.prediction import Prediction
from protos.draft import DraftRow
from runtime.core.proposing import PredictionProposer
from tests.support.naive_search import TOKENS, naive_chain, naive_longest, places_of, request


@given(
    tokens=TOKENS,
    sizes=st.sampled_from([(6, 2), (3, 2, 1), (1,), (4,)]),
    reach=st.integers(6, 12),
    step=st.integers(1, 7),
)
def test_places_are_those_of_a_naive_search(tokens: list[int], sizes: tuple[int, ...], reach: int, step: int) -> None:
    places = Places(sizes, reach)
    while places.add(tokens, step):
        pass
    length, ends = places.longest(tokens, tokens)
    wanted_length, wanted = naive_longest(tokens, tokens, min(sizes), reach)
    of_size = next((size for size in sizes if size <= wanted_length), 0)
    if len(places_of(tokens, tokens, of_size)) <= MAX_PLACES or not of_size:
        assert (length, ends) == (wanted_length, wanted)
    else:
        assert set(ends) <= set(places_of(tokens, tokens, length))


TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=8)


@given(texts=TEXTS, others=st.integers(0, 2), count=st.integers(1, 7), least=st.sampled_from([0.0, 0.1, 0.4, 0.7]))
def test_a_chain_follows_the_most_frequent_token(texts: list[list[int]], others: int, count: int, least: float) -> None:
    guess = votes.chain(texts, len(texts) + others, count, least)
    tokens, score = naive_chain(texts, len(texts) + others, count, least)
    assert guess.draft.tokens == tokens
    assert guess.score == pytest.approx(score)


@given(texts=TEXTS, others=st.integers(0, 2), count=st.integers(1, 9), least=st.sampled_from([0.0, 0.1, 0.4, 0.7]))
def test_a_tree_has_the_likeliest_nodes(texts: list[list[int]], others: int, count: int, least: float) -> None:
    total = len(texts) + others
    guess = votes.tree(texts, total, count, least)
    share = Counter(tuple(text[: i + 1]) for text in texts for i in range(len(text)))
    allowed = sorted((n / total for n in share.values() if n / total >= least), reverse=True)
    parents = guess.draft.parents or range(-1, len(guess.draft) - 1)
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(guess.draft.tokens, parents, strict=True):
        assert parent < len(paths)
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert len(set(paths)) == len(paths) == min(count, len(allowed))
    assert [share[path] / total for path in paths] == allowed[: len(paths)]
    assert guess.score == pytest.approx(sum(allowed[: len(paths)]))
    assert guess.score >= votes.chain(texts, total, count, least).score - 1e-9


SALTED = st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.lists(st.integers(0, 2), max_size=30)), max_size=12)


@settings(deadline=None)
@given(
    answers=SALTED,
    rows=st.lists(st.tuples(st.sampled_from(["", "a", "c"]), TOKENS), min_size=1, max_size=4),
    limit=st.integers(1, 12),
)
def test_past_texts_are_found_as_by_a_naive_search(
    answers: list[tuple[str, list[int]]], rows: list[tuple[str, list[int]]], limit: int
) -> None:
    past = AnswerIndex(1 << 20, limit, 24)
    for salt, answer in answers:
        past.add(salt, answer)
    found = past.matches([salt for salt, _ in rows], [tokens for _, tokens in rows], [1] * len(rows))
    for (salt, tokens), matches in zip(rows, found, strict=True):
        not_empty = [(owner, answer) for owner, answer in answers if answer]  # an empty one takes no other's place
        kept = [answer for owner, answer in not_empty[-limit:] if owner == salt]
        ends = {size: [places_of(answer, tokens, size) for answer in reversed(kept)] for size in range(1, 25)}
        wanted = {size: sum(map(len, ends[size])) for size in range(1, min(25, len(tokens) + 1))}
        got = {match.length: match for match in matches}
        for size, number in wanted.items():
            texts = [text[end:] for text, of in zip(reversed(kept), ends[size], strict=True) for end in of]
            if sum(len(answer) for _, answer in answers) > CHAIN:  # other n-grams may share a chain and fill it
                assert size not in got or all(text in texts for text in past.after(got[size].places, 50))
            elif number > wanted.get(size + 1, 0):
                assert past.after(got[size].places, 50) == texts
        assert all(match.length in wanted and match.places for match in matches)


@settings(deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 2), min_size=1, max_size=30)), max_size=9),
    pattern=TOKENS,
)
def test_growing_texts_are_found_like_whole_ones(steps: list[tuple[int, list[int]]], pattern: list[int]) -> None:
    past, whole = AnswerIndex(1 << 20, 10, 24), AnswerIndex(1 << 20, 10, 24)
    texts = [AnswerText("", reserved=24) for _ in range(3)]  # in small chunks, so that many matches cross their ends
    for one, tokens in steps:
        past.extend([(texts[one], tokens)])
    for one in range(3):
        whole.add("", [token for number, tokens in steps for token in tokens if number == one])

    def found(index: AnswerIndex) -> dict[int, list[list[int]]]:
        [matches] = index.matches([""], [pattern], [1])
        return {match.length: sorted(index.after(match.places, 24)) for match in matches if len(match.places) < CHAIN}

    if not any(len(match.places) == CHAIN for match in whole.matches([""], [pattern], [1])[0]):
        assert found(past) == found(whole)


def test_the_ring_forgets_the_oldest_texts_and_stays_within_its_bound() -> None:
    rng = random.Random(0)
    past = AnswerIndex(1 << 20, 10_000, 24)
    said = [[rng.randrange(50) for _ in range(rng.randrange(200, 900))] for _ in range(400)]
    for answer in said:
        past.add("", answer)
    assert past.num_bytes <= 1 << 20
    assert 10 < len(past) < 100
    ends = [answer[-30:-5] for answer in said]
    found = [_longest(past, end) for end in ends]
    remembered = [one.length == 24 for one in found]
    assert remembered == [False] * (400 - len(past)) + [True] * len(past)
    for answer, one in list(zip(said, found, strict=True))[-len(past) :]:
        assert past.after(one.places, 24) == [answer[-5:]]
    assert _longest(AnswerIndex(1 << 20, 10, 24), [1, 2, 3]).length == 0


def _longest(past: AnswerIndex, pattern: list[int]) -> AnswerMatch:
    [matches] = past.matches([""], [pattern], [1])
    return max(matches, default=AnswerMatch(0, []))


def test_a_text_longer_than_the_ring_loses_its_start() -> None:
    past = AnswerIndex(1 << 20, 10, 24)
    answer = list(range(100_000))
    past.add("", answer)
    past.add("", [5, 6, 7, *range(200_000, 200_100)])
    early, late, new = (_longest(past, end) for end in (answer[10:40], answer[-40:-10], [5, 6]))
    assert (early.length, late.length, past.after(new.places, 1)) == (0, 0, [[7]])
    past = AnswerIndex(1 << 20, 10, 24)
    past.add("", answer)
    assert _longest(past, answer[-40:-10]).length == 24


def naive_prediction(prediction: list[int], outputs: list[list[int]], k: int) -> list[list[int]]:
    """What is expected after each of *outputs*, which grow."""
    at, is_followed, said, before = 0, True, [], 0
    for output in outputs:
        new, before = output[before:], len(output)
        if is_followed and prediction[at : at + len(new)] == new:
            at += len(new)
        elif new:
            _, ends = naive_longest(prediction, output[-16:], 2, 16)
            is_followed = bool(ends)
            at = min([end for end in ends if end >= at] or ends[:1] or [at])
        said.append(prediction[at : at + k] if is_followed else [])
    return said


@given(prediction=TOKENS, output=TOKENS, steps=st.lists(st.integers(0, 5), max_size=12), k=st.integers(1, 5))
def test_a_prediction_is_followed(prediction: list[int], output: list[int], steps: list[int], k: int) -> None:
    # Few enough places that none is left out.
    prediction, outputs = prediction[:MAX_PLACES], [output[: sum(steps[:i])] for i in range(len(steps) + 1)]
    mine = Prediction(prediction)
    mine.prepare(1000)
    assert [mine.follow(output, k) for output in outputs] == naive_prediction(prediction, outputs, k)


def test_the_answer_is_found_again_in_a_prediction_after_an_edit() -> None:
    proposer = PredictionProposer()
    prompt, answer = [9, 1, 2, 9, 1], [1, 2, 3, 4, 5, 6, 7, 8]
    proposer.begin(4, request(prompt, prediction_token_ids=tuple(answer)))

    def guess(*output: int) -> tuple[int, ...]:
        return proposer.propose([DraftRow(0, 3, [*prompt, *output], 4)])[0].tokens

    assert guess() == (1, 2, 3)
    assert guess(1, 2) == (3, 4, 5)
    assert guess(1, 2, 0) == ()
    assert guess(1, 2, 0, 9, 1, 5, 6) == (7, 8)
