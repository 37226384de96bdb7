"""Lookahead decoding against simulated targets: its window, its pool, and accepted drafts."""

import random

import pytest

from proposers.lookahead import LookaheadProposer, LookaheadShape, LookaheadState, NgramPool
from protos.config.engine import SpeculativeConfig
from protos.draft import Draft, DraftRow
from protos.errors import ConfigError
from protos.messages import Request, Sampling
from protos.sampling import SamplingParams
from tests.support.tree_proposer import accept_without_probes


def path_to(draft: Draft, node: int) -> list[int]:
    parents, tokens = draft.node_parents(), []
    while node >= 0:
        tokens.append(draft.tokens[node])
        node = parents[node]
    return tokens[::-1]


class Target:
    """A deterministic language: each token depends on the last `order` tokens."""

    def __init__(self, order: int, size: int = 40) -> None:
        self.order, self.size = order, size

    def after(self, text: list[int]) -> int:
        return random.Random(hash(tuple(text[-self.order :]))).randrange(self.size)

    def run(self, text: list[int], draft: Draft) -> tuple[list[int], list[int]]:
        """Return new tokens and the tokens after the probes, as the target worker does."""
        y = [self.after(text), *(self.after(text + path_to(draft, node)) for node in range(len(draft)))]
        path = accept_without_probes(draft, y)
        probed = [y[1 + node] for node, probe in enumerate(draft.probes) if probe]
        return [y[0], *(y[1 + node] for node in path)], probed


def make(k: int = 64, **keys: int) -> LookaheadProposer:
    config = SpeculativeConfig("lookahead", k, **{f"lookahead_{name}": value for name, value in keys.items()})
    return LookaheadProposer.create(config, None)


def begin(proposer: LookaheadProposer, prompt: list[int], key: int = 1) -> None:
    proposer.begin(key, Request("r", tuple(prompt), SamplingParams(), Sampling(seed=0), 100))


def test_the_window_grows_to_its_levels_and_moves_with_the_text() -> None:
    shape, target, text = LookaheadShape(3, 2, 4), Target(1), [1, 2, 3]
    state = LookaheadState.of(text, shape, 0)
    first = state.levels[0].copy()
    draft = state.draft(text, 20)
    assert (draft.tokens, draft.parents, draft.probes) == (tuple(first), (-1, 0, 1), (True,) * 3)
    said, probed = target.run(text, draft)
    state.learn(len(said), probed)
    text += said
    # One token later: the first column is past, and one entry of each line is unknown.
    assert state.levels[0][:2] == first[1:]
    assert state.levels[1][:2] == [target.after([token]) for token in first[1:]]
    assert [len(level) for level in state.levels] == [3, 3]

    before = [level.copy() for level in state.levels]
    draft = state.draft(text, 20)
    assert draft.parents == (-1, 0, 1, 0, 1, 2)
    said, probed = target.run(text, draft)
    state.learn(len(said), probed)
    # The oldest line has left, so that nothing had to move.
    assert state.levels[0] == before[1]
    assert state.levels[1] == [target.after([token]) for token in before[1]]
    for column in range(3):
        assert (before[1][column], state.levels[1][column]) in state.pool.following(before[0][column])


def test_an_n_gram_found_is_tried_when_its_first_token_comes() -> None:
    state = LookaheadState.of([9], LookaheadShape(2, 2, 4), 0)
    state.pool.add(5, (6, 7))
    state.pool.add(5, (6, 8))
    draft = state.draft([9, 5], 20)
    count = draft.probes.count(False)
    assert draft.probes == (False,) * count + (True,) * (len(draft) - count)
    assert [path_to(draft, node) for node in range(count)] == [[6], [6, 8], [6, 7]]


def test_probes_are_left_out_where_they_do_not_fit_and_cut_ones_teach_nothing() -> None:
    state = LookaheadState.of([9], LookaheadShape(4, 2, 4), 0)
    state.pool.add(5, (6, 7))
    assert state.draft([9, 5], 4) == Draft((6, 7), (-1, 0), (False, False))
    assert len(state.draft([9, 5], 6)) == 6
    window = state.levels[0].copy()
    state.learn(1, [1, 2])  # two of the four came back
    assert state.levels[0][:3] == window[1:]
    assert len(state.levels) == 1


def test_a_pool_keeps_the_newest_of_each_first_token() -> None:
    pool = NgramPool(2)
    for rest in ((1, 1), (2, 2), (1, 1), (3, 3)):
        pool.add(0, rest)
    assert pool.following(0) == [(3, 3), (1, 1)]
    assert pool.following(1) == []


@pytest.mark.parametrize(("order", "wanted"), [(1, 2.0), (2, 1.3)])
def test_a_target_says_what_it_was_found_to_say(order: int, wanted: float) -> None:
    """More than one token a round, and all of them the target's own."""
    target, prompt = Target(order, size=12), [1, 2, 3, 4]
    proposer = make()
    begin(proposer, prompt)
    text, rounds = prompt.copy(), 0
    while len(text) < 300:
        [draft] = proposer.propose([DraftRow(0, 64, text, 1)])
        said, probed = target.run(text, draft)
        assert len(draft) <= 64
        proposer.grow(1, said, probed)
        text += said
        rounds += 1
    plain = prompt.copy()
    while len(plain) < len(text):
        plain.append(target.after(plain))
    assert text == plain
    assert (len(text) - len(prompt)) / rounds > wanted
    proposer.end(1, text)
    assert not proposer._states


def test_the_window_is_narrowed_to_the_tokens_there_are() -> None:
    proposer = make(k=12, window=15, ngram=5)
    begin(proposer, [1, 2])
    for _ in range(6):
        [draft] = proposer.propose([DraftRow(0, 12, [1, 2], 1)])
        proposer.grow(1, [3], [7] * sum(draft.probes))
    assert sum(draft.probes) == 2 * 4
    with pytest.raises(ConfigError, match="at least 8, got 7"):
        make(k=7, ngram=5)
    with pytest.raises(ConfigError, match="put it last"):
        LookaheadProposer.create(SpeculativeConfig(("lookahead", "ngram"), 60), None)
