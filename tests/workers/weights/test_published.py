"""Checkpoints that people use are accepted as published: configs, tensor names and shapes, without their weights."""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from protos.config.engine import ModelConfig
from protos.errors import ModelError
from tests.support.checkpoints.entry import Published
from tests.support.checkpoints.listed import PUBLISHED
from tests.support.documents import ROOT
from workers.attention import backend
from workers.attention.kv import bytes_per_token
from workers.model.loader import context_length
from workers.model.probe import probe, probe_states
from workers.model.quantization import check_quantization
from workers.recurrent.mixers import adapt, mixers
from workers.recurrent.pool import RecurrentShapes
from workers.weights import families
from workers.weights.building import on_meta
from workers.weights.finding import check_left_over, find_all
from workers.weights.hub import read_config
from workers.weights.quantized.formats import format_of
from workers.weights.quantized.stored import DequantizedWeight, StoredTensors
from workers.weights.reader import Checkpoint
from workers.weights.renaming import read_renaming
from workers.weights.wrapped import language_config

NAMED = pytest.mark.parametrize("entry", PUBLISHED, ids=lambda entry: entry.name.rpartition("/")[2])
BESIDE = re.compile(
    r"(?:model\.)?(?:vision_tower|visual|multi_modal_projector|embed_vision|embed_audio|audio_tower)\.|mtp\."
)
"""What belongs to no text model."""


def opened(entry: Published, folder: Path) -> tuple[Any, Checkpoint]:
    """Return the model of *entry* on the meta device, and its checkpoint; *folder* is given its `config.json`."""
    headers = entry.headers()
    (folder / "config.json").write_text(json.dumps(entry.config))
    config = language_config(AutoConfig.from_pretrained(folder), headers.keys())
    model = on_meta(config, torch.bfloat16)
    tensors = StoredTensors(dict.fromkeys(headers.keys(), headers))
    quantized = format_of(getattr(config, "quantization_config", None))
    renaming = read_renaming(str(config.model_type), headers.keys())
    return model, Checkpoint(tensors, renaming, model.base_model_prefix, quantized)


@NAMED
def test_the_config_is_accepted(entry: Published, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(entry.config))
    config = ModelConfig(str(tmp_path), max_model_len=entry.max_model_len)
    described = read_config(config)
    families.check(described, entry.name, entry.max_model_len)
    check_quantization(config, described, torch.device("cpu"))
    assert context_length(described, config) >= 4096
    assert described["dtype" if "dtype" in described else "torch_dtype"] in {"bfloat16", "float16"}


@NAMED
def test_tensors_and_cache(entry: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor is found, none is left over, and the caches have the sizes worked out by hand."""
    model, checkpoint = opened(entry, tmp_path)
    tensors = model.state_dict(keep_vars=True)
    found = find_all(entry.name, tensors, checkpoint)
    assert sum(isinstance(stored, DequantizedWeight) for stored in found.values()) == entry.quantized
    if entry.parameters is not None:
        assert sum(tensors[name].numel() for name in found) == entry.parameters
    unread = checkpoint.unread()
    check_left_over(entry.name, model, unread)
    layers = int(model.config.num_hidden_layers)
    left = [name for name in unread if not BESIDE.match(name) and not _is_later(name, layers)]
    assert [name for name in left if not name.endswith("input_scale") and not re.search(entry.unread, name)] == []
    assert _bytes_of(model, entry.name, monkeypatch) == (entry.kv_bytes, entry.state_bytes)


def _is_later(name: str, layers: int) -> bool:
    """Return whether a tensor is in a layer after the last: those predict several tokens."""
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return match is not None and int(match[1]) >= layers


def _bytes_of(model: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Return the bytes of K and V of a token, and of a recurrent state, as the loader finds them by running a token.

    On the meta device operators find no attention, and no token is sent to experts. Modules that change no shape are
    left out: they take long there.
    """
    monkeypatch.setattr(torch.ops.slipstream, "paged_attention", backend._op)
    for path, module in model.named_modules():
        is_plain = type(module).__name__.endswith(("MLP", "RMSNorm")) and "experts" not in dict(module.named_children())
        if is_plain or path.endswith(".experts"):
            module.forward = _unchanged
    states: RecurrentShapes = {}
    if adapt(model):
        _run_once_a_kind(mixers(model).values())
        states = probe_states(model, name)
    each = sum(shape.num_bytes for shape in states.values())
    return bytes_per_token(probe(model, name), torch.bfloat16), each * len(mixers(model))


def _unchanged(hidden: torch.Tensor, *_: Any) -> torch.Tensor:
    return hidden


def _run_once_a_kind(modules: Iterable[torch.nn.Module]) -> None:
    """Let each of *modules* return what the first of its class returned: recurrences take long on the meta device."""
    outputs: dict[type, Any] = {}

    def once(module: torch.nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if type(module) not in outputs:
                outputs[type(module)] = forward(*args, **kwargs)
            return outputs[type(module)]

        return run

    for module in modules:
        module.forward = once(module, module.forward)


def test_a_tensor_too_many_or_too_few_is_refused(tmp_path: Path) -> None:
    entry = PUBLISHED[0]
    model, checkpoint = opened(entry, tmp_path)
    tensors = model.state_dict(keep_vars=True)
    find_all(entry.name, tensors, checkpoint)
    extra = "model.layers.0.self_attn.another.weight"
    with pytest.raises(ModelError, match=f"1 tensors in its decoder layers .* the first is {extra}"):
        check_left_over(entry.name, model, [*checkpoint.unread(), extra])
    with pytest.raises(ModelError, match="weights are missing"):
        find_all(entry.name, {**tensors, "model.another.weight": torch.empty(1, device="meta")}, checkpoint)


def test_the_page_lists_them() -> None:
    page = (ROOT / "docs/models.md").read_text()
    rows = re.findall(r"^\| \[?`([^`]+)`\]?[^|]* \| ([^|]+) \| `([^`]+)` \|$", page, re.M)
    assert rows == [(entry.name, entry.what, entry.command) for entry in PUBLISHED]
    assert len(PUBLISHED) >= 20
