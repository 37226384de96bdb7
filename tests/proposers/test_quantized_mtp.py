"""MTP heads within quantised checkpoints, as DeepSeek-V3's and GLM-4.5's: they draft as those of the values do."""

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from tests.support.models import quantized as formats
from tests.support.models import synthetic_layers

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [{"prompt_token_ids": ids} for ids in ([5, 9, 17, 5, 9, 17, 5, 9], [3, 1, 4, 1, 5, 9, 2, 6])]
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [24, 40], "activation_scheme": "dynamic"}
ROWS = {"num_bits": 8, "type": "float", "strategy": "channel"}
GROUP = {"targets": ["Linear"], "weights": ROWS, "input_activations": None, "format": "float-quantized"}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": GROUP}}
LAYERS = ("_proj.weight",)
TARGET_ALONE = tuple(f"layers.{layer}.self_attn.{part}_proj.weight" for layer in range(3) for part in "qkvo")


def drafted(folder: Path) -> tuple[list[list[int]], int, int]:
    """Return the greedy tokens, and how many draft tokens were proposed and accepted."""
    speculative = {"method": "mtp", "num_speculative_tokens": 3, "draft_shape": "chain", "policy": "fixed"}
    options: dict[str, Any] = {
        "speculative_config": speculative,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
    }
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    with LLM(str(folder), dtype="float32", num_gpu_blocks_override=64, **options) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        stats = llm.stats()
    return [list(output.outputs[0].token_ids) for output in outputs], stats.proposed, stats.accepted


@pytest.mark.parametrize(
    ("family", "quantize", "config", "ends"),
    [
        ("deepseek_v3", formats.fp8_blocks(24, 40), BLOCKS, LAYERS),
        ("glm4_moe", formats.compressed(ROWS, kind="float-quantized"), COMPRESSED, LAYERS),
        ("glm4_moe", formats.compressed(ROWS, kind="float-quantized"), COMPRESSED, TARGET_ALONE),
    ],
    ids=["fp8 in blocks", "compressed", "heads not quantised"],
)
def test_heads_of_a_quantised_target(
    family: str, quantize: formats.Quantize, config: dict[str, Any], ends: tuple[str, ...], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    source = synthetic_layers.with_mtp(family, tmp_path / "source")
    meant = formats.quantized(source, tmp_path / "quantised", quantize, config, ends)
    found, wanted = drafted(tmp_path / "quantised"), drafted(meant)
    assert found == wanted
    assert wanted[1] > 0
