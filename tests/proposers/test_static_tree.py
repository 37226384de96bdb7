"""Static trees: the best ones are the best, and what is cut off one is a tree."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proposers.shared.static_tree import StaticTree, rate
from protos.errors import ConfigError

Path = tuple[int, ...]


@pytest.mark.parametrize("max_depth", [1, 2, 3])
@pytest.mark.parametrize("decay", [1.0, 0.7])
def test_the_best_tree_has_the_likeliest_of_all_choices(max_depth: int, decay: float) -> None:
    every = [path for depth in range(1, max_depth + 1) for path in itertools.product(range(14), repeat=depth)]
    likeliest = sorted((rate(path, decay) for path in every), reverse=True)[:12]
    found = [rate(path, decay) for path in StaticTree.best(12, max_depth, decay).choices]
    assert found == pytest.approx(likeliest)


@st.composite
def trees(draw: st.DrawFn) -> set[Path]:
    """Choices each of which hangs on another one."""
    paths: set[Path] = set()
    for _ in range(draw(st.integers(1, 12))):
        parent = draw(st.sampled_from(sorted({()} | paths)))
        paths.add((*parent, draw(st.integers(0, 4))))
    return paths


@given(paths=trees(), max_depth=st.integers(1, 5), count=st.integers(0, 12))
def test_the_first_nodes_of_a_tree_are_a_tree(paths: set[Path], max_depth: int, count: int) -> None:
    tree = StaticTree.of(paths, max_depth, 0.9)
    assert set(tree.choices) == {path for path in paths if len(path) <= max_depth}
    first = tree.first(count)
    assert first.choices == tree.choices[:count]
    assert all(-1 <= parent < node for node, parent in enumerate(first.parents))
    for node, parent in enumerate(first.parents):
        assert first.choices[node][:-1] == (first.choices[parent] if parent >= 0 else ())


@given(paths=trees())
def test_levels_state_where_each_node_is_drafted(paths: set[Path]) -> None:
    tree = StaticTree.of(paths, 9, 0.9)
    points: list[Path] = [()]
    seen: list[int] = []
    for level in tree.levels:
        for node, place, rank in zip(level.nodes, level.input_M, level.ranks_M, strict=True):
            assert tree.choices[node] == (*points[place], rank)
            assert rank < level.width
        points = [tree.choices[level.nodes[place]] for place in level.next_inputs_P]
        assert all(any(path[: len(point)] == point != path for path in paths) for point in points)
        seen += level.nodes
    assert sorted(seen) == list(range(len(tree.choices)))


def test_three_draft_tokens_hold_four_in_five() -> None:
    assert math.fsum(rate((rank,), 1.0) for rank in range(3)) == pytest.approx(0.82, abs=0.01)


def test_a_choice_that_hangs_on_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\(1, 0\), but not its parent \(1,\)"):
        StaticTree.of(((0,), (1, 0)), 3, 0.9)


def test_a_chain_is_a_draft_without_parents() -> None:
    assert StaticTree.chain(3).draft([5, 6, 7]).is_chain
    assert StaticTree.of(((0,), (0, 0)), 3, 0.9).draft([5, 6]).is_chain
    assert not StaticTree.best(3, 2, 0.9).draft([5, 6, 7]).is_chain
