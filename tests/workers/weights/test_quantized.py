"""Quantised checkpoints: the values that are loaded, whole and split over ranks, and what is refused."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from protos.config.engine import ModelConfig
from protos.errors import ModelError
from slipstream import SamplingParams
from tests.support.distributed.tensor_parallel import TOLERANCE, VOCAB, check
from tests.support.identity import Reference, assert_identical, generate
from tests.support.models import quantized as formats
from tests.support.models.quantized_layers import values_of
from tests.support.models.tiny_models import build
from workers.model.loader import load
from workers.weights.described import read_described
from workers.weights.quantized.formats import format_of

pytestmark = pytest.mark.usefixtures("one_thread")

WIDE = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96}
LINEAR = ("_proj.weight",)
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
FP8_BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 32]}
MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
OF_INPUTS = {"strategy": "token", "dynamic": True}


@dataclass(frozen=True)
class Case:
    """A family, how its weights are quantised, and the `quantization_config` of such a checkpoint.

    *tolerance* is of two ranks.
    """

    quantize: Callable[[], formats.Quantize]
    config: dict[str, Any]
    family: str = "llama"
    overrides: dict[str, Any] = field(default_factory=dict)
    ends: tuple[str, ...] = LINEAR
    tolerance: float = TOLERANCE


def _compressed(kind: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None, **case: Any) -> Case:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": kind}
    config = {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}}
    return Case(lambda: formats.compressed(weights, inputs=inputs, kind=kind), config | {"ignore": ["lm_head"]}, **case)


def _gptq(bits: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": False, "sym": False, **more}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [24, 40], "activation_scheme": "dynamic"}
KEPT_BLOCKS = BLOCKS | {"weight_block_size": [32, 32]}
MOE = {"moe_intermediate_size": 32}
WIDE_MOE = {"moe_intermediate_size": 64, "intermediate_size": 64}
"""Two ranks have slices of 32 columns, so experts stay quantised there, too."""

CASES = {
    "fp8 blocks": Case(lambda: formats.fp8_blocks(24, 40), BLOCKS),
    "fp8 rows": Case(lambda: formats.fp8_rows, {"quant_method": "fbgemm_fp8"}),
    "fp8 tensor": Case(lambda: formats.fp8_tensor, {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8 modelopt": Case(lambda: formats.fp8_tensor, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "fp8 experts": Case(lambda: formats.fp8_blocks(24, 40), BLOCKS, "deepseek_v3", MOE),
    "fp8 experts kept": Case(lambda: formats.fp8_blocks(32, 32), KEPT_BLOCKS, "qwen3_moe", WIDE_MOE),
    "gptq 4": Case(lambda: formats.gptq(4, 32), _gptq(4)),
    # In fp32, transformers itself is 1.2e-4 of the largest logit off its own logits in float64 here.
    "gptq 8": Case(lambda: formats.gptq(8, 32), _gptq(8), tolerance=5e-5),
    # With AVX2, both are off those in float64: transformers by 0.9e-5 of the largest logit, these by 1.2e-5.
    "gptq 2": Case(lambda: formats.gptq(2, 32), _gptq(2), tolerance=5e-5),
    "gptq act order": Case(lambda: formats.gptq(4, 32, in_order=False), _gptq(4, desc_act=True)),
    "gptq v2": Case(lambda: formats.gptq(4, 32, zero_shift=0), _gptq(4, checkpoint_format="gptq_v2")),
    "awq": Case(lambda: formats.awq(32), AWQ),
    "awq experts": Case(lambda: formats.awq(32), AWQ, "qwen3_moe", MOE),
    "awq experts kept": Case(lambda: formats.awq(32), AWQ, "qwen3_moe", WIDE_MOE),
    "gptq experts kept": Case(
        lambda: formats.gptq(4, 32), _gptq(4), "mixtral", WIDE_MOE, ("w1.weight", "w2.weight", "w3.weight")
    ),
    "mxfp4": Case(
        lambda: formats.mxfp4, {"quant_method": "mxfp4"}, "gpt_oss", WIDE | {"intermediate_size": 64},
        ("experts.gate_up_proj", "experts.down_proj"),
    ),
    "w4a16": _compressed("pack-quantized", INT4 | {"symmetric": True}),
    "w4a16 asymmetric": _compressed("pack-quantized", INT4 | {"symmetric": False}),
    "w8a8": _compressed("int-quantized", INT8, INT8 | OF_INPUTS),
    "fp8 dynamic": _compressed("float-quantized", FP8, FP8 | OF_INPUTS),
    "fp8 compressed blocks": _compressed("float-quantized", FP8_BLOCKS),
    "mxfp4 compressed": _compressed("mxfp4-pack-quantized", MXFP4),
}  # fmt: skip


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def _made(case: Case, folder: Path) -> tuple[Path, Path]:
    source = build(case.family, folder / "source", **WIDE | case.overrides)
    plain = formats.quantized(source, folder / "quantised", case.quantize(), case.config, case.ends)
    return folder / "quantised", plain


def test_the_values_are_those_that_the_format_means(case: Case, tmp_path: Path) -> None:
    folder, plain = _made(case, tmp_path)
    found, wanted = (values_of(load(ModelConfig(model=str(path))).model) for path in (folder, plain))
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        weight = values.mT if name.endswith(case.ends) and case.family == "gpt_oss" else values
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6, msg=lambda said, n=name: f"{n}: {said}")


def test_two_ranks_equal_transformers_on_those_values(case: Case, tmp_path: Path) -> None:
    folder, plain = _made(case, tmp_path)
    check(folder, 2, meant=plain, tolerance=case.tolerance)


def test_a_description_beside_the_config(tmp_path: Path) -> None:
    """As older ModelOpt wrote it, for instance nvidia/Llama-3.1-8B-Instruct-FP8."""
    folder, plain = _made(CASES["fp8 modelopt"], tmp_path)
    described = json.loads((folder / "config.json").read_text())
    del described["quantization_config"]
    (folder / "config.json").write_text(json.dumps(described))
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    beside = {"producer": {"name": "modelopt", "version": "0.17.0"}, "quantization": quantization}
    (folder / "hf_quant_config.json").write_text(json.dumps(beside))
    found, wanted = (values_of(load(ModelConfig(model=str(path))).model) for path in (folder, plain))
    for name, values in wanted.items():
        torch.testing.assert_close(found[name], values, rtol=1e-5, atol=1e-6)
    plain_config = json.loads((plain / "config.json").read_text())
    for nothing in ({"quant_algo": None, "kv_cache_quant_algo": "FP8"}, "x", None):
        (plain / "hf_quant_config.json").write_text(json.dumps({"quantization": nothing}))
        assert read_described(plain, "m") == plain_config
    quantization["quant_algo"] = "NVFP4"
    (folder / "hf_quant_config.json").write_text(json.dumps(beside))
    with pytest.raises(ModelError, match="quant_algo is 'NVFP4', but only 'FP8' is supported"):
        load(ModelConfig(model=str(folder)))


@pytest.mark.parametrize("name", ["awq", "fp8 compressed blocks", "mxfp4 compressed"])
def test_the_note_names_the_method_and_the_dtype(name: str, tmp_path: Path) -> None:
    folder, _ = _made(CASES[name], tmp_path)
    method = CASES[name].config["quant_method"]
    note = (
        f"weights are stored quantised ({method}): 21 of 22 linear layers stay so, the others are computed with as "
        "torch.float32"
    )
    assert note in load(ModelConfig(model=str(folder))).notes


@pytest.mark.parametrize(
    ("name", "kept"), [("fp8 experts kept", 3), ("awq experts kept", 3), ("mxfp4", 3), ("fp8 experts", 0)]
)
def test_the_note_counts_experts(name: str, kept: int, tmp_path: Path) -> None:
    folder, _ = _made(CASES[name], tmp_path)
    layers = 2 if name == "fp8 experts" else 3  # the first of deepseek_v3 is dense
    notes = load(ModelConfig(model=str(folder))).notes
    assert any(f"linear layers and the experts of {kept} of {layers} layers stay so" in note for note in notes)


FOUR = {"bits": 4, "group_size": 32}


@pytest.mark.parametrize(
    "changes",
    [
        {"quant_method": "intel/auto-round"},
        {"quant_method": "auto-round", "backend": "auto_round:gptq:exllamav2"},
        {"quant_method": "gptq", "checkpoint_format": "gptq", "dynamic": {"-:.*lm_head": {}}},
    ],
)
def test_other_names_of_gptqs_packing(changes: dict[str, Any]) -> None:
    assert format_of({**FOUR, **changes}) == format_of({**FOUR, "quant_method": "gptq"})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            r"\(bitsandbytes\); supported are auto-round, awq",
        ),
        ({"quant_method": "gptq", "bits": 3, "group_size": 32}, "bits is 3, but only 2, 4 and 8"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv', but only 4 and 'gemm'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo is 'NVFP4', but only 'FP8'"),
        ({"quant_method": "gptq", "bits": 4}, "cannot be read: 'group_size' is missing"),
        (
            {"quant_method": "gptq", **FOUR, "checkpoint_format": "marlin"},
            "checkpoint_format is 'marlin', but only 'gptq'",
        ),
        (
            {"quant_method": "gptq", **FOUR, "dynamic": {"-:.*gate.*": {}, r"+:.*\.v_proj": {"bits": 8}}},
            r"dynamic\['.*v_proj'\] has \{'bits': 8\}, but all quantised layers",
        ),
        (
            {"quant_method": "intel/auto-round", **FOUR, "backend": "auto_round:exllamav2"},
            "packing_format 'auto_round:exllamav2' is not supported",
        ),
        (FOUR, r"its weights are quantised \(mlx\)"),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparse format 'sparse-24-bitmask'",
        ),
    ],
)
def test_refused_before_weights_are_read(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    folder = build("llama", tmp_path)
    (folder / "model.safetensors").unlink()
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"quantization_config": changes}))
    with pytest.raises(ModelError, match=reason):
        load(ModelConfig(model=str(folder)))


DOWN = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("name", "missing", "reason"),
    [
        ("fp8 blocks", f"{DOWN}.weight_scale_inv", f"{DOWN}.weight is stored in fp8, but the checkpoint has no"),
        ("gptq 4", f"{DOWN}.scales", f"lacks {DOWN}.scales"),
        ("awq", f"{DOWN}.qzeros", f"{DOWN}.weight cannot be read: .*qzeros"),
        ("w4a16", f"{DOWN}.weight_scale", f"1 weights are missing from the checkpoint, the first is {DOWN}.weight"),
    ],
)
def test_a_missing_part(name: str, missing: str, reason: str, tmp_path: Path) -> None:
    folder, _ = _made(CASES[name], tmp_path)
    stored = load_file(folder / "model.safetensors")
    del stored[missing]
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=reason):
        load(ModelConfig(model=str(folder)))


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("fp8 blocks", "weight_scale_inv"),
        ("gptq 4", "scales"),
        ("awq", "scales"),
        ("w4a16", "weight_scale"),
        ("w8a8", "weight_scale"),
        ("fp8 compressed blocks", "weight_scale"),
        ("mxfp4 compressed", "weight_scale"),
    ],
)
def test_a_part_of_the_wrong_shape(name: str, part: str, tmp_path: Path) -> None:
    folder, _ = _made(CASES[name], tmp_path)
    stored = load_file(folder / "model.safetensors")
    stored[f"{DOWN}.{part}"] = stored[f"{DOWN}.{part}"][:1].clone()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"down_proj\.weight"):
        load(ModelConfig(model=str(folder)))


@pytest.mark.parametrize("name", ["awq", "mxfp4", "fp8 experts"])
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """With a quantised target, off, with n-grams and with a draft model that is quantised, too."""
    folder, plain = _made(CASES[name], tmp_path)
    draft, _ = _made(CASES["awq"], tmp_path / "draft")
    reference = Reference(plain)
    prompts = [[5, 9, 17, 5, 9, 17, 5, 9], [3, 1, 4, 1, 5, 9, 2, 6, 5], [40, 41, 42]]
    expected = [reference.greedy(prompt, 24) for prompt in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    ngram = {"method": "ngram", "num_speculative_tokens": 3}
    for speculative in (None, ngram, {"model": str(draft), "num_speculative_tokens": 3}):
        run = generate(folder, prompts, params, speculative_config=speculative)
        assert_identical(prompts, run.outputs, expected, reference)
        assert (run.proposed > 0) == (speculative is not None)
