"""Model-free proposers: their proposals equal naive computations, and following sequences holds nobody up."""

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proposers.ngram import NgramProposer
from proposers.shared import continuations as votes
from proposers.shared import sequence_index as following
from proposers.shared.answer_index import CHAIN, SIZES, AnswerIndex
from proposers.shared.ngram_index import MAX_PLACES, Places
from proposers.shared.prediction import Prediction
from proposers.suffix import SuffixProposer
from protos.config.engine import SpeculativeConfig
from protos.draft import DraftRow
from protos.messages import Request, Sampling
from protos.sampling import SamplingParams

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def request(prompt: list[int], **fields: Any) -> Request:
    return Request("r", tuple(prompt), SamplingParams(), Sampling(seed=0), 100, **fields)


def config(method: str | tuple[str, ...] = "suffix", k: int = 24, **keys: Any) -> SpeculativeConfig:
    return SpeculativeConfig(method=method, num_speculative_tokens=k, suffix_decoding_max_bytes=1 << 20, **keys)


def suffix(**keys: Any) -> SuffixProposer:
    return SuffixProposer.create(config(**keys), None)


def places_of(text: list[int], pattern: list[int], size: int) -> list[int]:
    """Places behind each occurrence in *text* of the last *size* tokens of *pattern* that has something behind it."""
    return [end for end in range(len(text) - 1, size - 1, -1) if text[end - size : end] == pattern[-size:]]


def naive_longest(text: list[int], pattern: list[int], smallest: int, reach: int) -> tuple[int, list[int]]:
    for size in range(min(reach, len(pattern)), smallest - 1, -1):
        if ends := places_of(text, pattern, size):
            return size, ends
    return 0, []


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


def naive_chain(texts: list[list[int]], count: int, least: float) -> tuple[tuple[int, ...], float]:
    tokens: list[int] = []
    score = 0.0
    while len(tokens) < count:
        going_on = [text[len(tokens)] for text in texts if text[: len(tokens)] == tokens and len(text) > len(tokens)]
        if not going_on:
            break
        token, votes_for = Counter(going_on).most_common(1)[0]  # the first seen of equals: the most recent
        if votes_for / len(texts) < least:
            break
        tokens.append(token)
        score += votes_for / len(texts)
    return tuple(tokens), score


TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=8)


@given(texts=TEXTS, count=st.integers(1, 7), least=st.sampled_from([0.0, 0.1, 0.4, 0.7]))
def test_a_chain_follows_the_most_frequent_token(texts: list[list[int]], count: int, least: float) -> None:
    guess = votes.chain(texts, count, least)
    tokens, score = naive_chain(texts, count, least)
    assert guess.draft.tokens == tokens
    assert guess.score == pytest.approx(score)


@given(texts=TEXTS, count=st.integers(1, 9), least=st.sampled_from([0.0, 0.1, 0.4, 0.7]))
def test_a_tree_has_the_likeliest_nodes(texts: list[list[int]], count: int, least: float) -> None:
    guess = votes.tree(texts, count, least)
    share = Counter(tuple(text[: i + 1]) for text in texts for i in range(len(text)))
    allowed = sorted((n / len(texts) for n in share.values() if n / len(texts) >= least), reverse=True)
    parents = guess.draft.parents or range(-1, len(guess.draft) - 1)
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(guess.draft.tokens, parents, strict=True):
        assert parent < len(paths)
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert len(set(paths)) == len(paths) == min(count, len(allowed))
    assert [share[path] / len(texts) for path in paths] == allowed[: len(paths)]
    assert guess.score == pytest.approx(sum(allowed[: len(paths)]))
    assert guess.score >= votes.chain(texts, count, least).score - 1e-9


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
    found = past.longest([salt for salt, _ in rows], [tokens for _, tokens in rows])
    for (salt, tokens), (length, places) in zip(rows, found, strict=True):
        kept = [answer for owner, answer in answers[-limit:] if owner == salt]
        matches = [naive_longest(answer, tokens, 2, 24) for answer in kept]
        wanted_length = max((size for size, _ in matches), default=0)
        wanted = [
            answer[end:]
            for answer, (size, ends) in reversed(list(zip(kept, matches, strict=True)))
            if size == wanted_length and size
            for end in ends
        ]
        level = next((size for size in SIZES if size <= wanted_length), 2)
        if sum(len(places_of(answer, tokens, level)) for answer in kept) <= CHAIN:
            assert length == wanted_length
            assert past.after(places, 50) == wanted


def test_the_ring_forgets_the_oldest_texts_and_stays_within_its_bound() -> None:
    rng = random.Random(0)
    past = AnswerIndex(1 << 20, 10_000, 24)
    said = [[rng.randrange(50) for _ in range(rng.randrange(200, 900))] for _ in range(400)]
    for answer in said:
        past.add("", answer)
    assert past.num_bytes <= 1 << 20
    assert 10 < len(past) < 100
    ends = [answer[-30:-5] for answer in said]
    found = past.longest([""] * len(ends), ends)
    remembered = [one.length == 24 for one in found]
    assert remembered == [False] * (400 - len(past)) + [True] * len(past)
    for answer, one in list(zip(said, found, strict=True))[-len(past) :]:
        assert past.after(one.places, 24) == [answer[-5:]]
    assert AnswerIndex(1 << 20, 10, 24).longest([""], [[1, 2, 3]])[0].length == 0


def test_a_text_longer_than_the_ring_loses_its_start() -> None:
    past = AnswerIndex(1 << 20, 10, 24)
    answer = list(range(100_000))
    past.add("", answer)
    past.add("", [5, 6, 7])
    [early, late, new] = past.longest([""] * 3, [answer[10:40], answer[-40:-10], [5, 6]])
    assert (early.length, late.length, past.after(new.places, 9)) == (0, 0, [[7]])
    past = AnswerIndex(1 << 20, 10, 24)
    past.add("", answer)
    assert past.longest([""], [answer[-40:-10]])[0].length == 24


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


def test_ngram_looks_a_prediction_up_first_and_finds_back_behind_an_edit() -> None:
    proposer = NgramProposer(2, 3)
    prompt, answer = [9, 1, 2, 9, 1], [1, 2, 3, 4, 5, 6, 7, 8]
    proposer.begin(4, request(prompt, prediction_token_ids=tuple(answer)))
    proposer.prepare()

    def guess(*output: int) -> tuple[int, ...]:
        return proposer.propose([DraftRow(0, 3, [*prompt, *output], 4)])[0].tokens

    assert guess() == (1, 2, 3)
    assert guess(1, 2) == (3, 4, 5)
    assert guess(1, 2, 0) == ()  # astray, and nothing in the text itself
    assert guess(1, 2, 0, 9, 1) == (1, 2, 0)  # in the text itself
    assert guess(1, 2, 0, 9, 1, 5, 6) == (7, 8)


@settings(deadline=None, max_examples=60)
@given(
    tokens=TOKENS,
    cut=st.integers(1, 60),
    answers=st.lists(TOKENS, max_size=4),
    k=st.integers(1, 8),
    factor=st.sampled_from([0.5, 1.0, 2.0]),
)
def test_suffix_equals_a_naive_computation(
    tokens: list[int], cut: int, answers: list[list[int]], k: int, factor: float
) -> None:
    proposer = suffix(k=k, suffix_decoding_max_spec_factor=factor)
    for key, answer in enumerate(answers, 100):
        proposer.begin(key, request([7]))
        proposer.end(key, [7, *answer])
    proposer.begin(1, request(tokens[:cut]))
    proposer.prepare()
    proposer.prepare()
    [draft] = proposer.propose([DraftRow(0, k, tokens, 1)])

    def guess(texts: list[list[int]], newest_first: list[tuple[list[int], int]], size: int) -> tuple[Any, float]:
        count = min(k, max(1, int(factor * size)))
        return naive_chain([text[end : end + count] for text, end in newest_first], count, 0.1) if size else ((), 0.0)

    size, ends = naive_longest(tokens, tokens, 2, 24)
    own = guess([tokens], [(tokens, end) for end in ends], size)
    matches = [(naive_longest(answer, tokens, 2, 24), answer) for answer in answers]
    size = max((match[0] for match, _ in matches), default=0)
    past = guess(answers, [(a, end) for (n, ends), a in reversed(matches) if n == size for end in ends], size)
    level = next((one for one in SIZES if one <= size), 2)
    crowded = (
        any(len(places_of(tokens, tokens, n)) > MAX_PLACES for n in (2, 6))
        or sum(len(places_of(answer, tokens, level)) for answer in answers) > CHAIN
    )
    if not crowded:
        assert draft.tokens == (own[0] if own[1] >= past[1] - 1e-9 else past[0])


def test_answers_of_other_tenants_are_not_proposed() -> None:
    secret = [11, 12, 13, 14, 15, 16, 17]
    proposer = suffix()
    proposer.begin(1, request([1], cache_salt="theirs"))
    proposer.end(1, [1, *secret])
    for key, salt in ((2, "ours"), (3, ""), (4, "theirs")):
        proposer.begin(key, request([11, 12, 13], cache_salt=salt))
    proposer.prepare()
    drafts = proposer.propose([DraftRow(0, 9, [11, 12, 13], key) for key in (2, 3, 4)])
    assert [draft.tokens for draft in drafts] == [(), (), (14, 15, 16)]


def test_prompts_are_taken_in_slices_and_answers_behind_them() -> None:
    proposer = suffix()
    prompt = list(range(3 * following.SLICE))
    proposer.begin(1, request(prompt))
    row = DraftRow(0, 4, [*prompt, 10, 11, 12], 1)
    rounds = 0
    while not proposer.propose([row])[0].tokens:
        proposer.prepare()
        rounds += 1
    assert rounds == 3
    assert proposer.propose([row])[0].tokens == (13, 14, 15)


def test_nothing_is_kept_of_sequences_that_ended() -> None:
    proposer = suffix(suffix_decoding_max_cached_requests=0)
    for key in range(1, 50):
        proposer.begin(key, request([1, 2, 3, 1]))
        proposer.propose([DraftRow(0, 4, [1, 2, 3, 1, 2], key)])
        proposer.end(key, [1, 2, 3, 1, 2])
    proposer.prepare()
    assert not proposer._followed
    assert not proposer._unprepared
    assert not proposer._finished


def test_nothing_is_kept_of_sequences_that_ended_while_speculation_was_off() -> None:
    for proposer in (suffix(suffix_decoding_max_cached_requests=0), NgramProposer(2, 3)):
        for key in range(50):
            proposer.begin(key, request([1, 2, 3, 1]))
        for key in range(1, 50):
            proposer.end(key, [1, 2, 3, 1, 2])
        assert [waiting.tokens for waiting in proposer._unprepared] == [(1, 2, 3, 1)]
        assert [*proposer._followed] == [0]
        proposer.prepare()
        assert [draft.tokens[:1] for draft in proposer.propose([DraftRow(0, 4, [1, 2, 3, 1, 2], 0)])] == [(3,)]


def test_in_a_cascade_suffix_guesses_only_where_it_is_confident() -> None:
    first, alone = suffix(method=("suffix", "draft_model")), suffix()
    weak = DraftRow(0, 4, [1, 2, 3, 1, 2, 4, 1, 2, 5, 6, 1, 2])
    strong = DraftRow(1, 4, [1, 2, 3, 4, 5, 6, 1, 2, 3])
    assert [len(draft) for draft in first.propose([weak, strong])] == [0, 3]
    assert all(alone.propose([weak, strong]))


def test_suffix_trees_branch_where_texts_do() -> None:
    tokens = [1, 2, 3, 9, 1, 2, 4, 8, 1, 2]
    [draft] = suffix(draft_shape="tree").propose([DraftRow(0, 8, tokens)])
    assert draft.parents
    assert {token for token, parent in zip(draft.tokens, draft.parents, strict=True) if parent == -1} == {3, 4}


def editing(rng: random.Random) -> tuple[list[int], list[int]]:
    """A text of functions over a small vocabulary, and the same with some tokens changed: copy-editing."""
    lines = [[rng.randrange(60) for _ in range(rng.randrange(3, 12))] for _ in range(30)]
    text = [token for line in lines for token in [*rng.choice(lines), 99, *line, 99]]
    return text, [rng.randrange(60) if rng.random() < 0.06 else token for token in text]


def tokens_a_round(proposer: NgramProposer | SuffixProposer, prompt: list[int], answer: list[int], k: int) -> float:
    """How many tokens of *answer* a round yields, if it is what the target says."""
    proposer.begin(1, request(prompt))
    for _ in range(3):
        proposer.prepare()
    said, rounds = 0, 0
    while said < len(answer):
        [draft] = proposer.propose([DraftRow(0, k, [*prompt, *answer[:said]], 1)])
        rest = answer[said:]
        said += (
            1 + next((i for i, token in enumerate(draft.tokens) if token != rest[i]), len(draft))
            if len(rest) > len(draft)
            else len(rest)
        )
        rounds += 1
    proposer.end(1, [*prompt, *answer])
    return len(answer) / rounds


def test_suffix_accepts_more_than_ngram_on_copy_editing() -> None:
    rng = random.Random(0)
    by_suffix, by_ngram, again = [], [], []
    for _ in range(5):
        prompt, answer = editing(rng)
        proposer = suffix(k=16)
        by_suffix.append(tokens_a_round(proposer, prompt, answer, 16))
        by_ngram.append(tokens_a_round(NgramProposer(5, 5), prompt, answer, 16))
        again.append(tokens_a_round(proposer, prompt, answer, 16))
    assert sum(by_suffix) > 1.1 * sum(by_ngram)
    assert sum(again) > 1.2 * sum(by_suffix)  # what was answered before is remembered
