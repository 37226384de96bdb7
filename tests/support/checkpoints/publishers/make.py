"""Makes the checkpoints. See the package."""

import importlib
import importlib.util
import json
import shutil
import sys
import tempfile
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from gpt_oss.torch.weights import Checkpoint
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP4QTensor
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from tests.support.checkpoints.auto_round import LOGITS, SIZES
from tests.support.checkpoints.making import arguments
from tests.support.checkpoints.publishers import FORMATS, MADE
from tests.support.models.tiny_models import build

Tensors = dict[str, torch.Tensor]
BLOCK, BLOCK_OF_MODELS = 32, 128
GPT_OSS_SIZES = {"hidden_size": 64, "intermediate_size": 64}
LAYERS = "_proj.weight"
FIRST_READ = "block.0.mlp.mlp1_weight"
"""A name under which OpenAI's reader looks for quantised weights."""


def fp8_blocks(source: Path, folder: Path, scales: str = "float", block: int = BLOCK) -> Tensors:
    """DeepSeek's format, by `transformers`."""
    config = FineGrainedFP8Config(weight_block_size=(block, block), scale_fmt=scales)
    asks = types.SimpleNamespace(quantization_config=config)
    stored, meant = {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        parts = Fp8Quantize(asks).convert({name: weight}) if name.endswith(LAYERS) else {name: weight}
        stored |= parts
        if len(parts) > 1:
            quantised, scale = parts.values()
            meant[name] = Fp8Dequantize(asks)._dequantize_one(quantised, scale, torch.float32)
    return written(source, folder, stored, config.to_dict(), meant)


def fbgemm(source: Path, folder: Path) -> Tensors:
    """FBGEMM's rows: its function for CPUs, without the libraries for GPUs that its package loads."""
    found = importlib.util.find_spec("fbgemm_gpu")
    assert found is not None and found.submodule_search_locations
    package = types.ModuleType("fbgemm_gpu")
    package.__path__ = list(found.submodule_search_locations)
    sys.modules["fbgemm_gpu"] = package
    library = importlib.import_module("fbgemm_gpu.experimental.gemm.triton_gemm.fp8_gemm")
    stored, meant = {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        stored[name] = weight
        if name.endswith(LAYERS):
            stored[name], scale_O = library.quantize_fp8_row(weight)
            stored[f"{name}_scale"] = scale_O[:, None]  # as transformers stores it
            meant[name] = stored[name].float() * scale_O[:, None]
    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    return written(source, folder, stored, config, meant)


def model_opt(source: Path, folder: Path) -> Tensors:
    """ModelOpt's own export."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    ids = torch.arange(64)[None] % model.config.vocab_size
    mtq.quantize(model, mtq.FP8_DEFAULT_CFG, forward_loop=lambda one: one(ids))
    export_hf_checkpoint(model, export_dir=folder)
    stored = load_file(folder / "model.safetensors")
    meant = {}
    for name, values in stored.items():
        meant[name] = values
        if values.dtype == torch.float8_e4m3fn:
            tensor = FP8QTensor(values.shape, torch.float32, values)
            meant[name] = tensor.dequantize(torch.float32, scale=stored[f"{name}_scale"])
    return meant


def gpt_oss(source: Path, folder: Path) -> Tensors:
    """ModelOpt's packing, and OpenAI's reading."""
    stored, meant = {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = weight
            continue
        packed, scales = MXFP4QTensor.quantize(weight.transpose(1, 2).contiguous(), BLOCK)
        experts, outputs, half = packed._quantized_data.shape
        parts = {
            "blocks": packed._quantized_data.reshape(experts, outputs, -1, BLOCK // 2).contiguous(),
            "scales": scales.reshape(experts, outputs, -1).contiguous(),
        }
        stored |= {f"{name}_{part}": values for part, values in parts.items()}
        read = folder / "read"
        read.mkdir(parents=True, exist_ok=True)
        save_file({f"{FIRST_READ}.{part}": values for part, values in parts.items()}, read / "weights.safetensors")
        meant[name] = Checkpoint(str(read), torch.device("cpu")).get(FIRST_READ).float().transpose(1, 2)
        assert meant[name].shape == (experts, 2 * half, outputs)
    return written(source, folder, stored, {"quant_method": "mxfp4"}, meant)


def written(source: Path, folder: Path, stored: Tensors, config: dict[str, Any], meant: Tensors) -> Tensors:
    """Write a checkpoint like *source* with other tensors; return *meant*."""
    folder.mkdir(exist_ok=True)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    described = json.loads((source / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    return meant


MAKE: dict[str, Callable[[Path, Path], Tensors]] = {
    "fp8_blocks": fp8_blocks,
    "fp8_blocks_ue8m0": partial(fp8_blocks, scales="ue8m0"),
    "fbgemm": fbgemm,
    "model_opt": model_opt,
    "gpt_oss": gpt_oss,
}
MAKE_OF_MODELS: dict[str, Callable[[Path, Path], Tensors]] = {
    "fp8_blocks": partial(fp8_blocks, block=BLOCK_OF_MODELS),
    "fp8_blocks_ue8m0": partial(fp8_blocks, scales="ue8m0", block=BLOCK_OF_MODELS),
    "fbgemm": fbgemm,
    "model_opt": model_opt,
}


def make_tiny() -> None:
    """Make all of the package anew."""
    with tempfile.TemporaryDirectory() as scratch:
        llama = build("llama", Path(scratch) / "llama", **SIZES)
        experts = build("gpt_oss", Path(scratch) / "experts", **GPT_OSS_SIZES)
        for name in FORMATS:
            source = experts if name == "gpt_oss" else llama
            made, kept = Path(scratch) / name, MADE / name
            meant = MAKE[name](source, made)
            kept.mkdir(exist_ok=True)
            for file in ("config.json", "model.safetensors"):
                shutil.copyfile(made / file, kept / file)
            model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
            model.load_state_dict(meant, strict=False)
            model.double().set_experts_implementation("eager")
            ids = torch.arange(40)[None] * 7 % model.config.vocab_size
            with torch.no_grad():
                save_file({"ids": ids, "logits": model(ids).logits.contiguous()}, kept / LOGITS)


def main() -> None:
    """Make the package's checkpoints, or those of a model."""
    options = arguments(__doc__).parse_args()
    if options.model is None:
        make_tiny()
    else:
        options.into.mkdir(parents=True, exist_ok=True)
        for name, make in MAKE_OF_MODELS.items():
            make(options.model, options.into / name)


if __name__ == "__main__":
    main()
