"""Makes the checkpoints. See the package."""

import shutil
import tempfile
from pathlib import Path

import torch
from auto_round import AutoRound
from auto_round.export.export_to_awq.utils import dequantize_gemm
from auto_round_extension.torch.qlinear_torch import QuantLinear as LayerOfRawZeros
from auto_round_extension.torch.qlinear_torch_zp import QuantLinear
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo import pair
from tests.support.checkpoints.auto_round import FORMATS, LOGITS, MADE, SIZES
from tests.support.checkpoints.making import arguments
from tests.support.models.tiny_models import build

GROUP, GROUP_OF_MODELS = 32, 128
ASKED = {
    "gptq_4_asymmetric": ("W4A16", "auto_gptq", False),
    "gptq_8": ("W8A16", "auto_gptq", True),
    "awq": ("W4A16", "auto_awq", False),
    "awq_symmetric": ("W4A16", "auto_awq", True),
    "own_gptq": ("W4A16", "auto_round:auto_gptq", True),
    "own_gptqmodel": ("W4A16", "auto_round:gptqmodel", False),
    "own_awq": ("W4A16", "auto_round:auto_awq", False),
}
"""The scheme, the format and whether zero points are in the middle."""
ASKED_OF_MODELS = ASKED | {
    "fp8_blocks": ("FP8_BLOCK", "llm_compressor", True),
    "int8": ("INT8", "llm_compressor", True),
    "mxfp4": ("MXFP4", "llm_compressor", True),
}
"""Those of whole models: with compressed-tensors' formats, whose tiny checkpoints tests make themselves."""


def make(source: Path, name: str, folder: Path, group: int = GROUP) -> Path:
    """Quantise *source* by rounding to the nearest; return the folder that AutoRound made in *folder*."""
    scheme, format_, symmetric = ASKED_OF_MODELS[name]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(pair()[0])
    options = {"sym": symmetric, "iters": 0, "disable_opt_rtn": True, "device_map": "cpu"}
    options |= {"group_size": group} if name in ASKED else {}
    AutoRound(model, tokenizer, scheme=scheme, **options).quantize_and_save(str(folder), format=format_)
    return next(path.parent for path in folder.rglob("model.safetensors"))


def meant(stored: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """Return the weights `[O, I]` of the quantised layers as the library reads them."""
    weights = {}
    for packed in [key for key in stored if key.endswith(".qweight")]:
        module = packed.removesuffix(".qweight")
        codes, zeros, scales = (stored[f"{module}.{part}"] for part in ("qweight", "qzeros", "scales"))
        if "awq" in name:
            weight_IO = dequantize_gemm(codes, zeros, scales.float(), 4, GROUP)
        else:
            bits = 8 if "8" in name else 4
            inputs = codes.shape[0] * 32 // bits
            kind = LayerOfRawZeros if name == "own_gptqmodel" else QuantLinear
            layer = kind(bits, GROUP, inputs, codes.shape[1], bias=False)
            layer.qweight, layer.qzeros, layer.scales = codes, zeros, scales.float()
            weight_IO = layer(torch.eye(inputs))
        weights[f"{module}.weight"] = weight_IO.T.contiguous()
    return weights


def make_tiny() -> None:
    """Make all of the package anew."""
    with tempfile.TemporaryDirectory() as scratch:
        source = build("llama", Path(scratch) / "source", **SIZES)
        for name in FORMATS:
            made, kept = make(source, name, Path(scratch) / name), MADE / name
            kept.mkdir(exist_ok=True)
            for file in ("config.json", "model.safetensors"):
                shutil.copyfile(made / file, kept / file)
            model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
            model.load_state_dict(meant(load_file(kept / "model.safetensors"), name), strict=False)
            model.double()
            ids = torch.arange(40)[None] * 7 % model.config.vocab_size
            with torch.no_grad():
                save_file({"ids": ids, "logits": model(ids).logits.contiguous()}, kept / LOGITS)


def main() -> None:
    """Make the package's checkpoints, or those of a model."""
    options = arguments(__doc__).parse_args()
    if options.model is None:
        make_tiny()
    else:
        for name in ASKED_OF_MODELS:
            print(make(options.model, name, options.into / name, GROUP_OF_MODELS), flush=True)


if __name__ == "__main__":
    main()
