"""Suffix decoding equals a naive computation, and reads its texts in bounded slices."""

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from proposers.ngram import NgramProposer
from proposers.shared import sequence_index as following
from proposers.shared.answer_index import CHAIN, SIZES
from proposers.shared.ngram_index import MAX_PLACES
from proposers.suffix import SuffixProposer
from protos.config.engine import SpeculativeConfig
from protos.draft import DraftRow
from tests.support.naive_search import TOKENS, naive_chain, naive_longest, places_of, request


def config(method: str | tuple[str, ...] = "suffix", k: int = 24, **keys: Any) -> SpeculativeConfig:
    return SpeculativeConfig(method=method, num_speculative_tokens=k, suffix_decoding_max_bytes=1 << 20, **keys)


def suffix(**keys: Any) -> SuffixProposer:
    return SuffixProposer.create(config(**keys), None)


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


def test_prompts_are_taken_in_slices_and_answers_after_them() -> None:
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
    assert not proposer._sequences
    assert not proposer._unprepared
    assert not proposer._finished


def test_nothing_is_kept_of_sequences_that_ended_while_speculation_was_off() -> None:
    for proposer in (suffix(suffix_decoding_max_cached_requests=0), NgramProposer(2, 3)):
        for key in range(50):
            proposer.begin(key, request([1, 2, 3, 1]))
        for key in range(1, 50):
            proposer.end(key, [1, 2, 3, 1, 2])
        assert [waiting.tokens for waiting in proposer._unprepared] == [(1, 2, 3, 1)]
        assert [*proposer._sequences] == [0]
        proposer.prepare()
        assert [draft.tokens[:1] for draft in proposer.propose([DraftRow(0, 4, [1, 2, 3, 1, 2], 0)])] == [(3,)]


def test_in_a_cascade_suffix_drafts_only_where_it_is_confident() -> None:
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
    """Return the number of tokens per round if the target generates *answer*."""
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
