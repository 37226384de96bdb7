"""Acceptance: the emitted tokens are the target's own choices along a path of the draft, as many as there can be."""

from hypothesis import given, settings
from hypothesis import strategies as st

from protos.draft import Draft
from tests.support.tree_proposer import accept_without_probes
from workers.verification.acceptance import accept

IDS = st.integers(-1, 3)  # few, so that much is accepted; -1: no token could be chosen


@st.composite
def chains(draw: st.DrawFn) -> list[tuple[list[int], list[int]]]:
    rows = draw(st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=8))
    return [(row, draw(st.lists(IDS, min_size=len(row) + 1, max_size=len(row) + 1))) for row in rows]


@st.composite
def trees(draw: st.DrawFn) -> tuple[Draft, list[int]]:
    size = draw(st.integers(1, 14))
    tokens = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    parents = [draw(st.integers(-1, node - 1)) for node in range(size)]
    probes = draw(st.one_of(st.just([]), st.lists(st.booleans(), min_size=size, max_size=size)))
    choices = draw(st.lists(IDS, min_size=size + 1, max_size=size + 1))
    return Draft(tuple(tokens), tuple(parents), tuple(probes)), choices


def naive(draft: list[int], choices: list[int]) -> int:
    accepted = 0
    while accepted < len(draft) and draft[accepted] == choices[accepted]:
        accepted += 1
    return accepted


@given(chains())
@settings(max_examples=300, deadline=None)
def test_chains_as_a_naive_loop(rows: list[tuple[list[int], list[int]]]) -> None:
    for draft, choices in rows:
        assert accept(Draft(tuple(draft)), choices) == list(range(naive(draft, choices)))


@given(chains())
@settings(max_examples=100, deadline=None)
def test_a_chain_is_the_tree_with_one_child_a_node(rows: list[tuple[list[int], list[int]]]) -> None:
    for draft, choices in rows:
        spelt_out = Draft(tuple(draft), tuple(range(-1, len(draft) - 1)), (False,) * len(draft))
        assert accept(spelt_out, choices) == accept(Draft(tuple(draft)), choices)


@given(trees())
@settings(max_examples=500, deadline=None)
def test_trees(case: tuple[Draft, list[int]]) -> None:
    draft, choices = case
    probes = draft.probes or (False,) * len(draft)
    path = accept_without_probes(draft, choices)
    emitted = [choices[0], *(choices[node + 1] for node in path)]
    for node, before, token in zip(path, [-1, *path], emitted, strict=False):
        assert draft.parents[node] == before  # a path that begins at the root
        assert draft.tokens[node] == token  # every accepted token is the target's choice there
        assert not probes[node]
    last = path[-1] if path else -1
    assert not [
        node
        for node in range(len(draft))
        if draft.parents[node] == last and not probes[node] and draft.tokens[node] == emitted[-1]
    ]  # nothing more could have been accepted


def test_probes_are_never_accepted_nor_anything_after_them() -> None:
    chain = Draft((5, 6, 7), probes=(False, True, False))
    assert accept_without_probes(chain, [5, 6, 7, 8]) == [0]
    beside = Draft((5, 5, 6), (-1, -1, 1), (True, False, False))
    assert accept_without_probes(beside, [5, 0, 6, 1]) == [1, 2]


def test_no_draft_accepts_nothing() -> None:
    assert accept(Draft(()), [3]) == []


def test_a_failed_choice_ends_the_path() -> None:
    assert accept(Draft((1, 2)), [1, -1, 2]) == [0]
