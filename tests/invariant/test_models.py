"""Logits under `batch_invariant`: for every family the same bits, however a position was computed."""

from functools import partial
from pathlib import Path

import pytest
import torch

from protos.config.engine import ModelConfig
from tests.support.distributed.ranks import in_memory
from tests.support.models.invariant_model import BLOCK, LENGTH, VOCAB, Model, check, on_two_ranks, ways
from tests.support.models.tiny_models import FAMILIES, build
from tests.workers.model.test_models import reference_logits
from workers.distributed.groups import Group
from workers.distributed.renewable import RenewableGroup
from workers.model.loader import load
from workers.model.runner import ModelRunner

pytestmark = pytest.mark.usefixtures("one_thread")

SPLIT_QUICKLY = frozenset({"llama", "gemma2", "phi3", "olmo2", "gpt2", "gpt_bigcode", "opt", "cohere", "stablelm",
                           "mixtral", "gpt_oss", "deepseek_v3"})  # fmt: skip
"""One family for each way of splitting weights."""


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_same_bits_however_they_are_computed(family: str, tmp_path: Path) -> None:
    found = ways(Model(build(family, tmp_path, vocab_size=VOCAB)))
    assert found["prefill"].isfinite().all()
    assert len(found) == 7
    check(found, found["prefill"])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_is_still_the_model(family: str, tmp_path: Path) -> None:
    """Equal bits could be equally wrong, so logits are compared with `transformers`."""
    model = Model(folder := build(family, tmp_path, vocab_size=VOCAB), "float32")
    exact = reference_logits(folder, [model.texts[0]], "eager")[0]
    assert (model.feed([(0, 0, LENGTH)])[0] - exact).abs().max() <= 2e-5 * exact.abs().max()


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_in_other_dtypes(family: str, dtype: str, tmp_path: Path) -> None:
    model = Model(folder := build(family, tmp_path, vocab_size=VOCAB), dtype)
    found = ways(model)
    check(found, found["prefill"])
    exact = reference_logits(folder, [model.texts[0]], "eager")[0]
    error = (found["prefill"] - exact).abs()
    if dtype == "float32":
        assert error.max() <= 2e-5 * exact.abs().max()
    else:
        assert error.mean() <= 0.01 * exact.abs().max()


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=() if family in SPLIT_QUICKLY else pytest.mark.full) for family in FAMILIES]
)
def test_two_ranks_say_the_same_bits(family: str, tmp_path: Path) -> None:
    on_two_ranks(build(family, tmp_path, vocab_size=VOCAB))


def test_more_ranks_and_biases(tmp_path: Path) -> None:
    """Ranks meet after they have loaded, as target workers do."""

    def logits(folder: Path, group: Group) -> torch.Tensor:
        renewable = RenewableGroup(group.rank, group.size)
        model = Model(folder, group=renewable)
        renewable.use(group)
        return model.feed([(0, 0, LENGTH)])[0]

    for number, (family, changes) in enumerate(
        (("llama", {"attention_bias": True, "mlp_bias": True}), ("opt", {}), ("gpt_oss", {}))
    ):
        folder = build(family, tmp_path / str(number), vocab_size=VOCAB, **changes)
        expected = Model(folder).feed([(0, 0, LENGTH)])[0]
        found = in_memory(4, partial(logits, folder))
        check({"prefill": found[0]}, expected)


def test_without_it_bits_differ(tmp_path: Path) -> None:
    """Without the mode the same comparison fails, so it can detect differences."""
    model = Model(build("llama", tmp_path, vocab_size=VOCAB))
    plain = load(ModelConfig(model=str(tmp_path), device="cpu", dtype="bfloat16"))
    model.runner = ModelRunner(plain, model.slots, model.runner.cache.num_blocks, BLOCK)
    found = ways(model)
    with pytest.raises(AssertionError, match="positions differ"):
        check(found, found["prefill"])
