"""The bandwidth of a device's memory, and the time that it allows a step of decoding."""

import json
import time
from pathlib import Path

import torch
from safetensors import safe_open

COPIED_BYTES, SMALL_BYTES = 1 << 30, 1 << 27
COPIES = 20


def measured(device: str) -> float:
    """Return bytes a second, read and written, of copies on *device*: the median of several."""
    size = SMALL_BYTES if device == "cpu" else COPIED_BYTES
    source = torch.ones(size, dtype=torch.uint8, device=device)
    copy, seconds = torch.empty_like(source), []
    for _ in range(COPIES):
        _finish(device)
        began = time.perf_counter()
        copy.copy_(source)
        _finish(device)
        seconds.append(time.perf_counter() - began)
    return 2 * size / sorted(seconds)[COPIES // 2]


def _finish(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def read_bytes(folder: Path, rows: int, context: int) -> int:
    """Return the bytes that a decoding step of *rows* sequences of *context* tokens reads from memory.

    Those are all weights but the input embeddings, of which a row reads one line, and the KV cache.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                if "embed_tokens" not in name:
                    values = tensors.get_slice(name)
                    weights += 2 * torch.Size(values.get_shape()).numel()
    kv_token = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    return weights + rows * context * int(kv_token)
