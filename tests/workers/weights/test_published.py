"""Published checkpoints are accepted: on the meta device every tensor is found, in its shape, and none is left."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from protos.config.engine import ModelConfig
from tests.support.documents import ROOT
from tests.support.published.checkpoints import DENSE_AND_MIXED, Published
from tests.support.published.hybrids import HYBRID
from tests.support.published.tensors import Header
from workers.weights import families
from workers.weights.building import on_meta
from workers.weights.hub import read_config
from workers.weights.keeping import ROUTERS
from workers.weights.quantized.formats import format_of
from workers.weights.quantized.stored import DequantizedWeight, StoredTensors
from workers.weights.reader import Checkpoint
from workers.weights.wrapped import read_language_config

PUBLISHED = {**DENSE_AND_MIXED, **HYBRID}
QUICK = frozenset({"meta-llama/Llama-3.2-1B", "openai/gpt-oss-20b", "LiquidAI/LFM2-1.2B"})
PARTS = frozenset({"weight", "weight_scale", "weight_scale_inv", "qweight", "qzeros", "scales", "g_idx"})
"""What quantised formats store for one module."""


class Slice(NamedTuple):
    """Stands for safetensors' `PySafeSlice`."""

    dtype: str
    shape: tuple[int, ...]

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return self.dtype


class File:
    """Stands for a safetensors file without its data, and notes what was looked at."""

    def __init__(self, header: Header) -> None:
        self.header, self.seen = header, set[str]()

    def get_slice(self, name: str) -> Slice:
        self.seen.add(name)
        return Slice(*self.header[name])

    @property
    def left(self) -> set[str]:
        """Tensors that belong to none that was looked at."""
        owners = {name.rpartition(".")[0] for name in self.seen if name.rpartition(".")[2] in PARTS}
        stems = {name.removesuffix("_blocks") for name in self.seen if name.endswith("_blocks")}
        parts = {f"{owner}.{part}" for owner in owners for part in PARTS} | {f"{stem}_scales" for stem in stems}
        return set(self.header) - self.seen - parts


class Attended(TorchDispatchMode):
    """Notes how many keys and values a token has in each layer: on the meta device no backend is called."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.slipstream.paged_attention.default:
            self.elements.append(args[1].numel() + args[2].numel())
        return func(*args, **(kwargs or {}))


def kv_elements(model: Any) -> int:
    token = torch.zeros(1, 1, dtype=torch.int64, device="meta")
    with torch.inference_mode(), Attended() as attended:
        model(input_ids=token, position_ids=token, use_cache=False)
    return sum(attended.elements)


def built(published: Published, folder: Path) -> tuple[Any, Checkpoint, File]:
    """Check the config as a server does, and return the model on the meta device and its checkpoint."""
    (folder / "config.json").write_text(json.dumps(published.config))
    limit = 4096 if "--max-model-len" in published.options else None
    described = read_config(ModelConfig(model=str(folder), max_model_len=limit))
    families.check(described, "published", limit)
    heads = {name: torch.zeros(0) for name in published.header if name.endswith("lm_head.weight")}
    save_file(heads, folder / "model.safetensors")
    config = read_language_config(folder)
    model = on_meta(config, torch.bfloat16)
    file = File(published.header)
    stored = StoredTensors(dict.fromkeys(published.header, file))
    quantization = format_of(described.get("quantization_config"))
    return model, Checkpoint(stored, str(config.model_type), model.base_model_prefix, quantization), file


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in PUBLISHED]
)
def test_every_tensor_is_accepted(name: str, tmp_path: Path) -> None:
    published = PUBLISHED[name]
    model, checkpoint, file = built(published, tmp_path)
    wanted = {id(tensor): (full, tensor) for full, tensor in reversed(model.state_dict(keep_vars=True).items())}
    found = {full: checkpoint.find(full) for full, _ in wanted.values()}
    assert not [full for full, stored in found.items() if stored is None], "missing"
    for full, tensor in wanted.values():
        stored = found[full]
        assert stored is not None
        assert stored.shape == tuple(tensor.shape), full
    assert not sorted(left for left in file.left if not left.startswith(published.unread or ("-",))), "left over"
    linears = [module for module, layer in model.named_modules() if type(layer) is nn.Linear]
    kept = [module for module in linears if isinstance(found.get(f"{module}.weight"), DequantizedWeight)]
    assert len([module for module in kept if module.rpartition(".")[2] not in ROUTERS]) == published.kept
    if published.parameters is not None:
        assert sum(tensor.numel() for _, tensor in wanted.values()) == published.parameters
    assert kv_elements(model) == published.kv_elements


def test_the_documents_list_these_checkpoints() -> None:
    text = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| `")]
    shown = {row[1].strip().strip("`"): row[-2].strip().strip("`") for row in rows}
    assert shown == {name: f"slipstream serve {name} {it.options}".rstrip() for name, it in PUBLISHED.items()}
