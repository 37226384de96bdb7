"""Checkpoints of Medusa, MLP speculators, Hydra and recurrent drafters: names, contents and aliases."""

from pathlib import Path

import pytest
import torch

from protos.errors import ModelError
from tests.support.models import synthetic
from tests.support.models.format_readers import VOCAB, WIDTH, opened, same


def test_medusa_has_the_same_names_from_every_tool(target: Path) -> None:
    made = synthetic.medusa(target, heads=2, blocks=2)
    spec, tensors = opened(made, target)
    assert (spec.num_heads, spec.num_blocks, spec.output, spec.has_bias) == (2, 2, "own", True)
    assert tensors["blocks.1.0.bias"].equal(made.tensors["1.0.linear.bias"])
    assert tensors["heads.1.weight"].equal(made.tensors["1.2.weight"])
    beside = {"model.norm.weight": torch.ones(WIDTH), "lm_head.weight": torch.ones(VOCAB, WIDTH)}
    whole = made.renamed("medusa_head.{}".format).holding(beside)
    also = {name: tensor for name, tensor in opened(whole, target)[1].items() if name != "head.weight"}
    assert same(also, tensors)
    vllm = synthetic.medusa_vllm(target, heads=2, blocks=2)
    ours = opened(vllm, target)[1]
    assert ours["blocks.1.1.weight"].equal(vllm.tensors["medusa_heads.blocks.1.layers.1.weight"])
    assert ours["heads.0.weight"].equal(vllm.tensors["medusa_heads.lm_heads.0.weight"])
    bare = vllm.renamed(lambda name: name.removeprefix("medusa_heads."))
    assert same(opened(bare, target)[1], ours)


def test_medusa_without_outputs_goes_on_to_the_targets_head(target: Path) -> None:
    spec, tensors = opened(synthetic.medusa(target, own_heads=False), target)
    assert (spec.output, spec.num_heads) == ("target", 4)
    assert not any("head" in name for name in tensors)
    shared = opened(synthetic.medusa_vllm(target, shared=True), target)
    assert (shared[0].output, "head.weight" in shared[1]) == ("shared", True)


def test_medusa_truncated_vocabulary(target: Path) -> None:
    made = synthetic.medusa_vllm(target, kept=40)
    spec, tensors = opened(made, target)
    assert (spec.head_size, spec.vocab_size) == (40, VOCAB)
    assert tensors["target_ids"].equal(made.tensors["medusa_heads.token_map"])
    twice = made.holding({"medusa_heads.token_map": torch.zeros(40, dtype=torch.int64)})
    with pytest.raises(ModelError, match="token_map maps 40 draft ids to 1"):
        opened(twice, target)


def test_medusa_heads_that_are_there_count_whatever_the_config_says(target: Path) -> None:
    """Published configs have 2 although there are 5."""
    assert opened(synthetic.medusa(target, heads=5).having(medusa_num_heads=2), target)[0].num_heads == 5
    with pytest.raises(ModelError, match=r"blocks\.5\.0\.weight should be \[32, 32\].*no such tensor"):
        opened(synthetic.medusa(target, heads=5).having(medusa_num_heads=6), target)


def test_tied_mlp_speculator_shares_all_but_the_first_projection(target: Path) -> None:
    made = synthetic.mlp_speculator(target, heads=4, tied=True, scale=True)
    assert sum("proj" in name for name in made.tensors) == 2
    spec, tensors = opened(made, target)
    assert (spec.num_heads, spec.inner, spec.scale_input) == (4, 24, True)
    assert tensors["proj.3.weight"] is tensors["proj.1.weight"]
    assert tensors["head.3.weight"] is tensors["head.0.weight"]
    repeated = made.holding({"speculator.emb.2.weight": made.tensors["speculator.emb.0.weight"].clone()})
    assert same(opened(repeated, target)[1], tensors)
    with pytest.raises(ModelError, match=r"speculator\.emb\.2\.weight differs from speculator\.emb\.0\.weight"):
        opened(made.holding({"speculator.emb.2.weight": torch.zeros(VOCAB, 24)}), target)


def test_mlp_speculator_without_inner_width_has_the_outer_one(target: Path) -> None:
    made = synthetic.mlp_speculator(target, inner=WIDTH).having(inner_dim=0)
    assert opened(made, target)[0].inner == WIDTH


@pytest.mark.parametrize("prefix", [False, True])
def test_hydra_numbers_are_the_same_with_and_without_dropouts(target: Path, prefix: bool) -> None:
    made = synthetic.hydra(target, blocks=3, prefix=prefix)
    spec, tensors = opened(made, target)
    at = 3 if prefix else 1
    assert tensors["blocks.2.1.weight"].equal(made.tensors[f"hydra_mlp.2.{at}.linear.weight"])
    assert tensors["blocks.2.0.res.bias"].equal(made.tensors[f"hydra_mlp.2.{1 if prefix else 0}.res_connection.bias"])
    assert tensors["blocks.2.0.weight"].shape == (WIDTH, 4 * WIDTH)
    assert (spec.prefix is not None, "prefix.norm.weight" in tensors) == (prefix, prefix)
    assert "prefix.embed_tokens.weight" not in tensors
    once = made.without(*(name for name in made.tensors if name.split(".")[2] == ("5" if prefix else "2")))
    assert same(opened(once, target)[1], tensors)


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("stored", ["input_embed_fn.weight", "hydra_head.input_embed_fn.weight"])
def test_hydra_as_its_train_script_saves_it(target: Path, prefix: bool, stored: str) -> None:
    """`HydraMLP` and `HydraPrefixMLP` register the target's embedding as a child, so their state dicts hold it."""
    made = synthetic.hydra(target, prefix=prefix)
    saved = made.holding({stored: torch.ones(VOCAB, WIDTH)})
    assert same(opened(saved, target)[1], opened(made, target)[1])
    smaller = made.holding({stored: torch.ones(VOCAB - 6, WIDTH)})
    with pytest.raises(ModelError, match=rf"{stored} is \[90, 32\], but the target's embedding is \[96, 32\]"):
        opened(smaller, target)


def test_hydra_blocks_that_do_not_see_tokens(target: Path) -> None:
    spec, tensors = opened(synthetic.hydra(target, grounded=False), target)
    assert not spec.grounded
    assert tensors["blocks.2.0.weight"].shape == (WIDTH, WIDTH)


def test_recurrent_drafters_with_and_without_their_parts(target: Path) -> None:
    spec, tensors = opened(synthetic.recurrent(target, blocks=2), target)
    assert (spec.has_input, spec.exit, spec.is_rnn) == (False, 2 * WIDTH, True)
    assert {"blocks.1.bias", "head.weight", "rnn_u.bias"} <= tensors.keys()
    spec, tensors = opened(synthetic.recurrent(target, exit_dim=24, rnn=False).renamed("drafter.{}".format), target)
    assert tensors["input_proj.weight"].shape == (24, 2 * WIDTH)
    assert not any(name.startswith("rnn") for name in tensors)
