"""Experts that stay quantised: their values, their rows, their memory, and the tokens of models that have them."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from protos.config.engine import ModelConfig
from slipstream import SamplingParams
from tests.support.distributed.ranks import in_memory
from tests.support.distributed.tensor_parallel import VOCAB, check, share
from tests.support.identity import Reference, assert_identical, generate
from tests.support.models import quantized as formats
from tests.support.models.quantized_layers import meant, stacked_values
from tests.support.models.synthetic_layers import with_mtp
from tests.support.models.tiny_models import build, perturb, settings
from workers.device import weight_bytes
from workers.distributed.groups import Group
from workers.model.loader import load
from workers.quantization.experts import QuantizedExperts, is_described, stack, weights_of
from workers.quantization.schemes import SCHEMES
from workers.quantization.weight import Code, QuantizedWeight
from workers.weights.quantizing import quantize_module

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5_moe_text",
            "lfm2_moe", "granitemoehybrid", "nemotron_h", "jamba", "kimi_linear")  # fmt: skip
"""Those of `TESTED` that have experts, but for families whose experts are DeepSeek-V3's."""

INNER = {"intermediate_size": 64, "moe_intermediate_size": 64}
"""Two ranks split the inner width into multiples of 32."""
SIZES = {"vocab_size": VOCAB, "hidden_size": 64, **INNER}

ENDS = ("experts.gate_up_proj", "experts.down_proj")
PROMPTS = [[5, 9, 17, 5, 9, 17, 5, 9], [3, 1, 4, 1, 5, 9, 2, 6, 5], [40, 41, 42]]


def experts_of(family: str) -> Any:
    """Return the experts of one layer of a random model."""
    config = AutoConfig.for_model(family, **settings(family, **INNER))
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    found: Any = next(module for module in model.modules() if is_described(module))
    generator = torch.Generator().manual_seed(1)
    for weight in found.parameters():
        weight.requires_grad_(False).normal_(0.0, 0.25, generator=generator)
    return found


def quantise(experts: Any, name: str) -> QuantizedExperts:
    """Return *experts* with weights in *name*, and set theirs to the values that these mean."""
    owner = torch.nn.ModuleDict({"experts": copy.deepcopy(experts)})
    quantize_module(owner, SCHEMES[name], ())
    found = owner["experts"]
    assert isinstance(found, QuantizedExperts)
    for key, outputs in weights_of(experts).items():
        held_ENK = stacked_values(found.get_submodule(key))  # type: ignore[arg-type]
        experts.get_parameter(key).copy_(held_ENK if outputs == 1 else held_ENK.mT)
    return found


def routed(experts: Any, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states, two different experts for each, and their factors."""
    generator = torch.Generator().manual_seed(2)
    _, outputs = weights_of(experts).values()
    count, width = experts.down_proj.shape[0], experts.down_proj.shape[outputs]
    ids_TK = torch.stack([torch.randperm(count, generator=generator)[:2] for _ in range(tokens)])
    return torch.randn(tokens, width, generator=generator), ids_TK, torch.rand(tokens, 2, generator=generator)


@pytest.mark.parametrize("family", FAMILIES)
def test_they_compute_what_transformers_computes_with_their_values(family: str) -> None:
    plain = experts_of(family)
    for name in SCHEMES:
        found = quantise(plain, name)
        for tokens in (1, 9):
            inputs = routed(plain, tokens)
            wanted_TH = plain(*inputs)
            torch.testing.assert_close(found(*inputs), wanted_TH, rtol=1e-4, atol=1e-4 * float(wanted_TH.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_row_does_not_depend_on_the_others(family: str, dtype: torch.dtype) -> None:
    plain = experts_of(family).to(dtype)
    for name in SCHEMES:
        found = quantise(plain, name)
        x_TH, ids_TK, weights_TK = routed(plain, 11)
        rows = (x_TH.to(dtype), ids_TK, weights_TK.to(dtype))
        together_TH = found(*rows)
        assert together_TH.dtype == dtype
        alone = [found(*(part[t : t + 1] for part in rows)) for t in range(len(x_TH))]
        assert torch.equal(together_TH, torch.cat(alone))
        assert torch.equal(together_TH[3:8], found(*(part[3:8] for part in rows)))


def test_an_expert_that_does_not_exist_adds_nothing() -> None:
    found = quantise(experts_of("qwen3_moe"), "int8")
    x_TH, ids_TK, weights_TK = routed(experts_of("qwen3_moe"), 3)
    outside = ids_TK.clone()
    outside[:, 1] = 4
    weights_TK[:, 1] = 0.0
    assert torch.equal(found(x_TH, outside, weights_TK), found(x_TH, ids_TK, weights_TK))


def test_a_product_reads_every_value_of_fp4() -> None:
    """All 16 codes with small, large and subnormal scales, against the format's own table (OCP Microscaling)."""
    codes_NK = torch.randint(0, 16, (2, 6, 64), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    scales_NG = torch.tensor([[0, 120], [127, 130], [1, 140], [118, 127], [127, 127], [100, 90]], dtype=torch.uint8)
    layer = stack((QuantizedWeight(Code.FP4, codes, scales_NG, None, 32) for codes in codes_NK), 2)
    assert layer is not None
    values_ENK = torch.cat([formats.FP4, -formats.FP4])[codes_NK.long()]
    factors_NK = torch.exp2(scales_NG.double() - 127).repeat_interleave(32, 1)
    eye = torch.eye(64)
    found = torch.stack([layer(eye, torch.full((64,), e), None).T for e in range(2)])
    assert torch.equal(found.double(), values_ENK.double() * factors_NK)


def _note(kept: int, linears: str) -> str:
    return f"{linears} linear layers and the experts of {kept} of 3 layers"


@pytest.mark.parametrize(("family", "name"), [("qwen3_moe", "int8"), ("qwen3_moe", "int4"), ("gpt_oss", "fp8")])
def test_tokens_on_the_fly_are_those_of_transformers(family: str, name: str, tmp_path: Path) -> None:
    folder = build(family, tmp_path / "plain", **SIZES)
    reference = Reference(meant(folder, name, tmp_path / "meant"))
    expected = [reference.greedy(prompt, 20) for prompt in PROMPTS]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    draft = {"model": str(perturb(folder, tmp_path / "draft")), "quantization": name, "num_speculative_tokens": 3}
    for speculative in (None, {"method": "ngram", "num_speculative_tokens": 3}, draft):
        run = generate(folder, PROMPTS, params, quantization=name, speculative_config=speculative)
        assert_identical(PROMPTS, run.outputs, expected, reference)
        assert (run.proposed > 0) == (speculative is not None)
    check(folder, 2, meant=tmp_path / "meant", quantization=name)


def test_memory_is_saved(tmp_path: Path) -> None:
    """Experts are nearly all of these models; the limits have room for the rest."""
    wide = {**SIZES, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 256, "vocab_size": 64}
    for family in ("mixtral", "qwen3_moe", "gpt_oss"):
        folder = build(family, tmp_path / family, **wide)
        whole = weight_bytes(load(ModelConfig(model=str(folder))).model)
        for name, limit in {"int8": 0.3, "fp8": 0.3, "int4": 0.2}.items():
            loaded = load(ModelConfig(model=str(folder), quantization=name))
            assert weight_bytes(loaded.model) < limit * whole, (family, name)
            assert any(_note(3, f"weights are quantised to {name}: 13 of 13") == note for note in loaded.notes)


def test_mxfp4_is_held_as_it_is_stored(tmp_path: Path) -> None:
    """17 bytes for 32 weights, on one rank and, where 32 divides the slices, on two."""
    source = build("gpt_oss", tmp_path / "source", **SIZES)
    plain = formats.quantized(source, tmp_path / "stored", formats.mxfp4, {"quant_method": "mxfp4"}, ENDS)
    loaded = load(ModelConfig(model=str(tmp_path / "stored")))
    experts = [module for module in loaded.model.modules() if isinstance(module, QuantizedExperts)]
    stacks = [part for layer in experts for part in layer.modules() if "fp4" in part.extra_repr()]
    assert len(experts) == 3 and len(stacks) == 6
    for layer in stacks:
        assert weight_bytes(layer) == 4 * 64 * layer.out_features // 32 * 17
    assert any(_note(3, "weights are stored quantised (mxfp4): 0 of 13") in note for note in loaded.notes)
    check(tmp_path / "stored", 2, meant=plain)


def test_ranks_whose_slices_cut_blocks_dequantise(tmp_path: Path) -> None:
    """Slices of 96 columns keep the scales of their blocks of 32; slices of 48 do not."""
    source = build("gpt_oss", tmp_path / "source", **SIZES | {"intermediate_size": 192})
    formats.quantized(source, tmp_path / "stored", formats.mxfp4, {"quant_method": "mxfp4"}, ENDS)

    def kept(group: Group) -> int:
        modules = share(tmp_path / "stored", group).model.modules()
        return sum(isinstance(module, QuantizedExperts) for module in modules)

    assert in_memory(2, kept) == [3, 3]
    assert in_memory(4, kept) == [0, 0, 0, 0]


def test_a_head_with_experts_drafts_what_the_target_would_have_said(tmp_path: Path) -> None:
    target = with_mtp("glm4_moe", tmp_path / "target", vocab_size=VOCAB, moe_intermediate_size=64)
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    expected = generate(target, PROMPTS, params, quantization="int8").outputs
    speculative = {"method": "mtp", "num_speculative_tokens": 2, "quantization": "int8"}
    run = generate(target, PROMPTS, params, quantization="int8", speculative_config=speculative)
    assert_identical(PROMPTS, run.outputs, expected, Reference(meant(target, "int8", tmp_path / "meant")))
    assert run.proposed > 0
