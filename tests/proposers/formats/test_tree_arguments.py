"""Arguments that shape draft trees."""

from typing import Any

import pytest

from protos.config.method import Described
from protos.errors import ConfigError
from tests.support.checkpoint_arguments import parse, speculative


@pytest.mark.parametrize(
    ("written", "nodes"),
    [
        ("[(0,), (0, 0), (1,)]", ((0,), (1,), (0, 0))),
        ([[0], [1], [0, 0]], ((0,), (1,), (0, 0))),
    ],
)
def test_static_trees(written: object, nodes: object) -> None:
    for key in ("speculative_token_tree", "medusa_choices", "hydra-choices"):
        config = speculative(Described("medusa", 4), model="d", **{key: written})
        assert (config.speculative_token_tree, config.num_speculative_tokens) == (nodes, 3)


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ("[(0, 0)]", "has (0, 0), but not its parent (0,)"),
        ("[(0,), (-1,)]", "whole numbers from 0"),
        ("nonsense", "must be a list of paths"),
        ([], "must be a list of paths"),
        ([[0], []], "must be a list of paths"),
        ("__import__('os')", "must be a list of paths"),
    ],
)
def test_malformed_trees(tree: object, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        speculative(Described("medusa"), model="d", speculative_token_tree=tree)
    assert says in str(caught.value)


def test_a_tree_without_branches_is_a_chain() -> None:
    config = speculative(Described("draft_model"), model="d", speculative_token_tree="[(0,), (0,0), (0,0,0)]")
    assert (config.num_speculative_tokens, config.speculative_token_tree) == (3, None)


@pytest.mark.parametrize(
    ("keys", "shape"),
    [
        ({"eagle_topk": 10, "num_steps": 6, "num_speculative_tokens": 59}, (10, 6, 59)),
        ({"topk": 4, "num_steps": "3"}, (4, 3, 12)),
        ({"num_steps": 3}, (1, 3, 3)),
        ({"eagle_choices": [[0], [0, 0], [1], [1, 0]]}, (2, 2, 4)),
        ({}, (1, None, 5)),
    ],
)
def test_grown_trees(keys: dict[str, Any], shape: tuple[int, int | None, int]) -> None:
    config = speculative(Described("eagle"), model="d", **keys)
    assert (config.eagle_topk, config.num_steps, config.num_speculative_tokens) == shape
    assert config.speculative_token_tree is None


@pytest.mark.parametrize(
    ("flags", "shape"),
    [
        ({"speculative_num_steps": 5, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8}, (4, 5, 7)),
        ({"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}, (1, 3, 3)),
        ({"speculative_num_draft_tokens": 4}, (1, None, 4)),
    ],
)
def test_sglangs_names_shape_trees(flags: dict[str, int], shape: tuple[int, int | None, int]) -> None:
    config = parse(
        Described("eagle3"), speculative_algorithm="EAGLE3", speculative_draft_model_path="d", **flags
    ).speculative
    assert config is not None
    assert (config.eagle_topk, config.num_steps, config.num_speculative_tokens) == shape
