"""The shape of drafts where nothing is said about it: the authors' on a GPU, what is fastest on a CPU."""

from dataclasses import replace
from typing import Any

import pytest

from protos.config import arguments
from protos.config.default_shape import CPU_LENGTHS, for_device
from protos.config.engine import EngineConfig, SpeculativeConfig
from protos.config.method import Described
from protos.errors import ConfigError

Shape = tuple[int, int, int | None, str]
"""Nodes, width, levels, and the kind of shape."""
PUBLISHED: dict[str, Shape] = {
    # EaModel.from_pretrained: total_token 60 with the root, depth 7, top_k 10. Its loop feeds `depth` levels after the
    # first, so trees have depth + 1 levels.
    "eagle": (60 - 1, 10, 7 + 1, "auto"),
    "eagle3": (60 - 1, 10, 7 + 1, "auto"),
    # recurrent_drafting.cmd.generate: beam_width 10, beam_length 5 with the token that is known already.
    "recurrent": (10 * (5 - 1), 10, 5 - 1, "auto"),
}
LOADS = {"eagle3": Described("eagle3"), "eagle": Described("eagle"), "recurrent": Described("recurrent")}


def parsed(found: Described, **keys: Any) -> EngineConfig:
    given = {"model": "m", "speculative_config": {"model": "x", **keys}}
    return arguments.parse(given, detect=lambda model, revision: found)


def shape_on(device: str, config: EngineConfig) -> Shape:
    speculative = for_device(config, device).speculative
    assert speculative is not None and not speculative.has_default_shape
    return (
        speculative.num_speculative_tokens,
        speculative.eagle_topk,
        speculative.num_steps,
        speculative.draft_shape,
    )


@pytest.mark.parametrize("method", PUBLISHED)
def test_on_a_gpu_the_shape_is_the_authors(method: str) -> None:
    assert shape_on("cuda", parsed(LOADS[method])) == PUBLISHED[method]


@pytest.mark.parametrize("method", PUBLISHED)
def test_on_a_cpu_drafts_are_short_chains(method: str) -> None:
    assert shape_on("cpu", parsed(LOADS[method])) == (CPU_LENGTHS[method], 1, None, "chain")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("keys", "shape"),
    [
        ({"num_speculative_tokens": 5}, (5, 1, None, "auto")),
        ({"eagle_topk": 4, "num_steps": 3}, (12, 4, 3, "auto")),
        ({"num_steps": 3}, (3, 1, 3, "auto")),
        ({"speculative_token_tree": [[0], [0, 0]]}, (2, 1, None, "chain")),
        ({"num_speculative_tokens_per_batch_size": [[1, 4, 3]]}, (3, 1, None, "auto")),
        ({"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0}, (5, 1, None, "auto")),
    ],
    ids=str,
)
def test_a_shape_that_is_given_is_kept_on_every_device(device: str, keys: dict[str, Any], shape: Shape) -> None:
    assert shape_on(device, parsed(LOADS["eagle3"], **keys)) == shape


def test_what_a_checkpoint_states_is_kept() -> None:
    assert shape_on("cuda", parsed(Described("eagle3", 3, "speculative_tokens"))) == (3, 1, None, "auto")


def test_a_kind_of_shape_alone_is_filled_in() -> None:
    assert shape_on("cpu", parsed(LOADS["eagle"], draft_shape="tree")) == (59, 10, 8, "tree")
    assert shape_on("cuda", parsed(LOADS["eagle"], draft_shape="chain")) == (5, 1, None, "chain")


def test_other_methods_and_cascades_are_the_same_everywhere() -> None:
    for keys in ({"method": "draft_model"}, {"method": ["suffix", "eagle3"]}):
        config = parsed(Described(None), **keys)
        assert for_device(config, "cuda") == for_device(config, "cpu") == config
    off = EngineConfig(replace(parsed(LOADS["eagle"]).model))
    assert for_device(off, "cuda") == off


def test_the_mark_is_no_key_of_users() -> None:
    with pytest.raises(ConfigError, match="unknown key 'has_default_shape'"):
        parsed(LOADS["eagle"], has_default_shape=True)


def test_a_default_tree_takes_places_for_all_beams() -> None:
    speculative = for_device(parsed(LOADS["eagle3"]), "cuda").speculative
    assert isinstance(speculative, SpeculativeConfig)
    assert (speculative.tree_shape, speculative.draft_places, speculative.may_branch) == ((10, 8), 70, True)
