"""A target proves itself when it is loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from protos.config.engine import ModelConfig
from protos.errors import ModelError
from slipstream import LLM, SamplingParams
from tests.support.distributed.ranks import in_memory
from tests.support.models.tiny_models import COMMON, FAMILIES, MOE, build
from workers.distributed.groups import Group
from workers.model.loader import load
from workers.model.self_check import self_check

pytestmark = pytest.mark.usefixtures("one_thread")

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
WRONG: dict[str, dict[str, Any]] = {
    "phimoe": {**EXPERTS, "sliding_window": 12},
    "diffllama": {},
    "doge": {"sliding_window": 12},
    "bert": {"is_decoder": False},
}
"""Families that attend through the interface, but not only: a window it is not told of, two softmaxes in a layer, a
mask of their own, no causality."""


def _other(family: str, folder: Path, **settings: Any) -> Path:
    config = AutoConfig.for_model(family, **COMMON | settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0.0, 0.25, generator=generator)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_served_families_pass(family: str, dtype: Any, tmp_path: Path) -> None:
    folder = build(family, tmp_path)
    loaded = load(ModelConfig(model=str(folder), dtype=dtype))
    self_check(loaded, family)
    again = torch.randint(0, 96, (1, 30), generator=torch.Generator().manual_seed(1))
    wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=loaded.dtype, attn_implementation="eager")
    loaded.model.set_attn_implementation("eager")
    with torch.inference_mode():
        assert torch.equal(loaded.model(again).logits, wanted(again).logits), "windows are as before"


@pytest.mark.parametrize("family", WRONG)
def test_families_with_other_attention_are_refused(family: str, tmp_path: Path) -> None:
    folder = _other(family, tmp_path / "model", **WRONG[family])
    loaded = load(ModelConfig(model=str(folder), dtype="float32"))
    with pytest.raises(ModelError, match=rf"model_type '{family}'\) cannot be served: .* differ from transformers'"):
        self_check(loaded, family)


def test_two_ranks_check_together(tmp_path: Path) -> None:
    folder = build("gemma2", tmp_path)

    def work(group: Group) -> None:
        self_check(load(ModelConfig(model=str(folder), device="cpu"), group), "gemma2")

    in_memory(2, work)


def test_the_engine_checks_unless_told_not_to(tmp_path: Path) -> None:
    folder = _other("phimoe", tmp_path / "model", **WRONG["phimoe"])
    given: dict[str, Any] = {"model": str(folder), "skip_tokenizer_init": True, "enforce_eager": True}
    with pytest.raises(ModelError, match="skip_self_check serves it all the same"):
        LLM(**given)
    with LLM(**given, skip_self_check=True) as llm:
        assert llm.generate([{"prompt_token_ids": [5, 6]}], SamplingParams(max_tokens=3), use_tqdm=False)


def test_a_short_context_is_not_checked(tmp_path: Path) -> None:
    folder = _other("phimoe", tmp_path / "model", **WRONG["phimoe"], **{"max_position_embeddings": 20})
    self_check(load(ModelConfig(model=str(folder))), "phimoe")


def test_experts_that_rounding_swaps_do_not_fail(tmp_path: Path) -> None:
    folder = _other("qwen3_moe", tmp_path / "model", **MOE, head_dim=16)
    self_check(load(ModelConfig(model=str(folder), dtype="bfloat16")), "qwen3_moe")
