"""A draft that reads sinks and a window: its logits are those of `transformers` with that mask, on each backend."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from protos.config.kv_window import KVWindow
from tests.support.models.tiny_models import build
from tests.workers.model.test_models import PREFIX, fill, make_runner, paged_logits, sequences
from workers.attention import native
from workers.attention.torch import TorchAttention
from workers.model.runner import ModelRunner
from workers.slots import SlotTable

pytestmark = pytest.mark.usefixtures("one_thread")

LAYER_WINDOW = 12
"""The sliding window of the families below that have one."""


def additive(length: int, is_visible: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """An explicit mask `[1, 1, L, L]` from a function of the positions of queries and keys."""
    query_L1, key_1L = torch.arange(length)[:, None], torch.arange(length)[None]
    seen_LL = (key_1L <= query_L1) & is_visible(query_L1, key_1L)
    return torch.zeros(length, length).masked_fill(~seen_LL, torch.finfo(torch.float32).min)[None, None]


def reference(folder: Path, tokens: np.ndarray, window: KVWindow) -> torch.Tensor:
    """Return the logits of a text in one forward, with a mask for each kind of layer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    full = additive(len(tokens), lambda q, k: (q - k < window.size) | (k < window.sinks))
    sliding = torch.minimum(full, additive(len(tokens), lambda q, k: q - k < LAYER_WINDOW))
    kinds = set(getattr(model.config, "layer_types", None) or {"full_attention"})
    masks = {"full_attention": full, "sliding_attention": sliding}
    mask = masks if len(kinds) > 1 else sliding if model.config.model_type == "mistral" else full
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(tokens)[None], attention_mask=mask, use_cache=False).logits[0]


def windowed(folder: Path, rows: list[np.ndarray], window: KVWindow) -> ModelRunner:
    plain = make_runner(folder, rows)
    slots = SlotTable(len(rows), 64, plain.block_size)
    fill(slots, rows, plain.num_blocks)
    return ModelRunner(plain.loaded, slots, plain.num_blocks, plain.block_size, kv_window=window)


@pytest.fixture(params=["kernel", "torch"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Attend with one of the backends."""
    if request.param == "torch":
        monkeypatch.setattr(native, "NativeAttention", TorchAttention)
    return str(request.param)


@pytest.mark.parametrize("window", [KVWindow(1, 0), KVWindow(7, 4), KVWindow(16, 1), KVWindow(5, 0)], ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_logits_are_those_of_the_mask_spelt_out(family: str, window: KVWindow, backend: str, tmp_path: Path) -> None:
    rows = sequences()
    folder = build(family, tmp_path)
    runner = windowed(folder, rows, window)
    assert isinstance(runner.attention, TorchAttention) == (backend == "torch")
    for slot, found in enumerate(paged_logits(runner, rows)):
        wanted = reference(folder, rows[slot], window)[PREFIX if slot == 2 else 0 :]
        assert (found - wanted).abs().max() < 2e-4 * max(1.0, wanted.abs().max().item()), slot


def test_a_window_that_no_context_exceeds_changes_no_bit(backend: str, tmp_path: Path) -> None:
    rows = sequences()
    folder = build("llama", tmp_path)
    plain, wide = paged_logits(make_runner(folder, rows), rows), windowed(folder, rows, KVWindow(33, 4))
    assert all(torch.equal(*pair) for pair in zip(plain, paged_logits(wide, rows), strict=True))
