"""Tiny multimodal checkpoints around a language model."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.support.models.tiny_models import COMMON, settings

SEEING: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
GEMMA4_TEXT: dict[str, Any] = {
    **COMMON,
    "head_dim": 8,
    "global_head_dim": 8,
    "sliding_window": 12,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
TEXTS = {
    "gemma3": settings("gemma3_text"),
    "kimi_k25": settings("deepseek_v3"),
    "gemma4": GEMMA4_TEXT,
    "qwen3_5": settings("qwen3_5_text"),
    "qwen3_5_moe": settings("qwen3_5_moe_text"),
    "lfm2_vl": settings("lfm2"),
}
"""Settings of language models that need other ones than `COMMON`."""


def build(kind: str, folder: Path, *, seed: int = 0, **text: Any) -> Path:
    """Save a tiny random multimodal model of *kind* into *folder*; *text*: settings of its language model."""
    usual = AutoConfig.for_model(kind)
    given: dict[str, Any] = {key: 5 for key in ("image_token_id", "image_token_index") if hasattr(usual, key)}
    if usual.vision_config is not None:
        seen = {key: value for key, value in SEEING.items() if hasattr(usual.vision_config, key)}
        given["vision_config"] = {**usual.vision_config.to_dict(), **seen}
    language = {**TEXTS.get(kind, COMMON), "model_type": usual.get_text_config(decoder=True).model_type, **text}
    config = AutoConfig.for_model(kind, text_config=language, **given)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0.0, 0.25, generator=generator)
    model.save_pretrained(folder)
    # transformers 5.23 undoes a renaming in the vision tower of kimi_k25 in its language model, too.
    rename(folder, "language_model.model.blocks.", "language_model.model.layers.")
    return folder


def rename(folder: Path, old: str, new: str) -> None:
    """Rename the tensors whose names begin with *old*."""
    path = folder / "model.safetensors"
    tensors = {
        new + name.removeprefix(old) if name.startswith(old) else name: tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, {"format": "pt"})
