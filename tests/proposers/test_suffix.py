"""Suffix decoding drafts by the authors' rule, and reads its texts in bounded slices."""

import random
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from proposers.ngram import NgramProposer
from proposers.shared import sequence_index as following
from proposers.shared.answer_index import CHAIN
from proposers.suffix import SuffixProposer
from protos.config.engine import SpeculativeConfig
from protos.draft import DraftRow
from tests.support.naive_search import TOKENS, places_of, request
from tests.support.suffix_reference import ReferenceDraft, SuffixReference, continuations, possible_drafts


def config(method: str | tuple[str, ...] = "suffix", k: int = 24, **keys: Any) -> SpeculativeConfig:
    return SpeculativeConfig(method=method, num_speculative_tokens=k, suffix_decoding_max_bytes=1 << 20, **keys)


def suffix(**keys: Any) -> SuffixProposer:
    return SuffixProposer.create(config(**keys), None)


def wanted(
    tokens: list[int], answer: list[int], others: list[list[int]], k: int, factor: float
) -> tuple[list[ReferenceDraft], float]:
    """Return the drafts that the authors' rule allows, and the least score that the best has.

    The end of another answer, which nothing follows, is no occurrence.
    """
    allowed, least = [ReferenceDraft((), 0.0)], 0.0
    for size in range(1, min(24, len(tokens)) + 1):
        match, count = tokens[-size:], min(k, int(factor * size + 1e-6))
        own = continuations(tokens, match)
        past = [after for text in others for after in continuations(text, match) if after]
        past += continuations(answer, match)
        for after in (own, past):
            drafts = list(possible_drafts(after, len(after), count, 0.1)) if after else []
            allowed += drafts
            least = max(least, min((draft.score for draft in drafts), default=0.0))
    return allowed, least


@settings(deadline=None, max_examples=60)
@given(
    tokens=TOKENS,
    cut=st.integers(1, 60),
    others=st.tuples(st.lists(TOKENS, max_size=4), st.lists(TOKENS, max_size=3)),
    k=st.integers(1, 8),
    factor=st.sampled_from([0.5, 1.0, 2.0]),
)
def test_the_draft_with_the_highest_score_is_proposed(
    tokens: list[int], cut: int, others: tuple[list[list[int]], list[list[int]]], k: int, factor: float
) -> None:
    answers, running = others  # finished ones, and those being generated
    proposer = suffix(k=k, suffix_decoding_max_spec_factor=factor)
    for key, answer in enumerate(answers, 100):
        proposer.begin(key, request([7]))
        proposer.end(key, [7, *answer])
    proposer.begin(1, request(tokens[:cut]))
    proposer.prepare()
    rows = [DraftRow(0, k, tokens, 1)]
    for key, answer in enumerate(running, 200):
        proposer.begin(key, request([8]))
        rows.append(DraftRow(key, k, [8, *answer], key))
    [draft, *_] = proposer.propose(rows)
    texts = [tokens, *answers, *running]
    if sum(len(places_of(text, tokens, 1)) for text in texts) > CHAIN:
        return  # only the newest places are counted
    allowed, least = wanted(tokens, tokens[cut:], [*answers, *running], k, factor)
    assert any(draft.tokens == one.tokens and one.score >= least - 1e-6 for one in allowed)


def test_a_match_of_one_token_is_used() -> None:
    """7 occurred twice, the end included; 8 followed once: probability 1/2."""
    [draft] = suffix().propose([DraftRow(0, 9, [7, 8, 9, 7])])
    assert draft.tokens == (8,)


def test_a_shorter_match_with_a_higher_score_is_preferred() -> None:
    """0 1 2 occurs 3 times, the end included, and any draft after it scores 3 * 1/3 = 1.

    1 2 occurs 7 times; 3 4 follows 4 times, and scores 2 * 4/7 = 8/7. 2 alone has the same occurrences: 4/7.
    """
    four = [token for i in range(10, 14) for token in (i, 1, 2, 3, 4)]
    tokens = [0, 1, 2, 5, 6, 20, 0, 1, 2, 8, 9, 21, *four, 0, 1, 2]
    [draft] = suffix().propose([DraftRow(0, 9, tokens)])
    assert draft.tokens == (3, 4)


def test_an_answer_drafts_for_others_while_it_is_generated() -> None:
    """1 2 occurs twice in all answers, the own end included, and 3 4 follows once: it scores 2 * 1/2."""
    proposer = suffix()
    for key in (1, 2):
        proposer.begin(key, request([9 + key]))
    drafts = proposer.propose([DraftRow(0, 9, [10, 1, 2, 3, 4, 5], 1), DraftRow(1, 9, [11, 1, 2], 2)])
    assert [draft.tokens for draft in drafts] == [(), (3, 4)]


def similar_answers(rng: random.Random) -> list[list[int]]:
    """16 answers over few tokens, each with changes of its own."""
    words = [[rng.randrange(40) for _ in range(rng.randrange(2, 7))] for _ in range(12)]
    text = [token for _ in range(20) for token in rng.choice(words)]
    return [[rng.randrange(40) if rng.random() < 0.1 else token for token in text] for _ in range(16)]


@dataclass
class Replay:
    """Known answers that are generated with drafts."""

    answers: list[list[int]]
    said: list[int]
    steps: int = 0

    @property
    def unfinished(self) -> list[int]:
        return [key for key, answer in enumerate(self.answers) if self.said[key] < len(answer)]

    def commit(self, key: int, draft: tuple[int, ...]) -> list[int]:
        """Return the accepted tokens and the target's next one."""
        rest = self.answers[key][self.said[key] :]
        differs = (i for i, (one, other) in enumerate(zip(draft, rest[:-1], strict=False)) if one != other)
        new = rest[: next(differs, min(len(draft), len(rest) - 1)) + 1]
        self.said[key] += len(new)
        self.steps += 1
        return new


def num_steps(answers: list[list[int]], k: int) -> int:
    proposer, replay = suffix(k=k), Replay(answers, [0] * len(answers))
    for key in replay.unfinished:
        proposer.begin(key + 1, request([50, 51]))
    while keys := replay.unfinished:
        rows = [DraftRow(key, k, [50, 51, *answers[key][: replay.said[key]]], key + 1) for key in keys]
        for key, draft in zip(keys, proposer.propose(rows), strict=True):
            replay.commit(key, draft.tokens)
        proposer.prepare()
    return replay.steps


def num_steps_of_the_authors(answers: list[list[int]], k: int) -> int:
    reference, replay = SuffixReference(k, depth=k), Replay(answers, [0] * len(answers))
    for key in replay.unfinished:
        reference.begin(key, [50, 51])
    while keys := replay.unfinished:
        for key, draft in [(key, reference.propose(key)) for key in keys]:
            reference.grow(key, replay.commit(key, draft))
    return replay.steps


def test_similar_answers_at_once_take_no_more_steps_than_with_the_authors_trees() -> None:
    batches = [similar_answers(random.Random(seed)) for seed in range(2)]
    assert sum(num_steps(batch, 12) for batch in batches) <= sum(
        num_steps_of_the_authors(batch, 12) for batch in batches
    )


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


def test_suffix_trees_are_not_deeper_than_the_tokens_that_remain() -> None:
    tokens = [1, 2, 3, 9, 1, 2, 4, 8, 1, 2]
    [draft] = suffix(draft_shape="tree").propose([DraftRow(0, 8, tokens, depth=1)])
    assert sorted(draft.tokens) == [3, 4]


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
