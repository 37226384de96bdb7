"""Models over 8-bit K and V against `transformers`' own attention, whose K and V are rounded here, in plain torch."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from protos.capacity import kv_summary
from protos.config.engine import KVCacheDtype, ModelConfig
from protos.messages import WorkerInfo
from tests.support.distributed.ranks import in_memory
from tests.support.models.tiny_models import build
from tests.workers.model.test_models import BLOCK, PREFIX, SLOTS, fill, paged_logits, sequences
from workers.attention.torch import TorchAttention
from workers.distributed.groups import Group
from workers.model.loader import load
from workers.model.runner import ModelRunner
from workers.slots import SlotTable

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ("llama", "gemma2", "gpt_oss", "deepseek_v3")
"""Plain; soft caps and windows; sinks; key and value heads of different sizes."""
BLOCKS = 40
TOLERANCE = 2e-3
"""Largest error of a logit, relative to the largest logit. Sums in another order change the last bits of fp32, and so
now and then the 8-bit number that K or V is rounded to."""
QUANTIZED: tuple[KVCacheDtype, ...] = ("int8", "fp8")


def rounded(numbers: torch.Tensor, stored: KVCacheDtype) -> torch.Tensor:
    """Return what a cache of 8-bit numbers makes of K or V: a scale per vector, in bf16, not less than the quotient."""
    largest = 127.0 if stored == "int8" else 448.0
    exact = numbers.abs().amax(-1, keepdim=True) / largest
    scale = exact.bfloat16().float()
    scale = torch.where(scale < exact, torch.nextafter(exact.bfloat16(), torch.tensor(torch.inf).bfloat16()), scale)
    units = numbers / scale.float()
    return (units.round() if stored == "int8" else units.to(torch.float8_e4m3fn).float()) * scale


def reference_logits(
    folder: Path, rows: list[np.ndarray], stored: KVCacheDtype, monkeypatch: pytest.MonkeyPatch
) -> list[torch.Tensor]:
    """The logits of `transformers` with its own eager attention over rounded K and V."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    source = sys.modules[type(model).__module__]
    own = source.eager_attention_forward  # type: ignore[attr-defined]

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any
    ) -> Any:
        return own(module, query, rounded(key, stored), rounded(value, stored), *rest, **named)

    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(source, "eager_attention_forward", attend)
        return [model(input_ids=torch.from_numpy(row)[None], use_cache=False).logits[0] for row in rows]


def runner_of(folder: Path, rows: list[np.ndarray], stored: KVCacheDtype, group: Group | None = None) -> ModelRunner:
    slots = SlotTable(SLOTS, 64, BLOCK)
    fill(slots, rows, BLOCKS)
    return ModelRunner(load(ModelConfig(str(folder), device="cpu", kv_cache_dtype=stored), group), slots, BLOCKS, BLOCK)


def errors(found: list[torch.Tensor], reference: list[torch.Tensor]) -> list[float]:
    """The largest error of each row's logits, relative to the largest logit."""
    wanted = [logits[PREFIX:] if slot == 2 else logits for slot, logits in enumerate(reference)]
    return [float((a - b).abs().max() / b.abs().max().clamp(min=1.0)) for a, b in zip(found, wanted, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stored", QUANTIZED)
def test_logits(family: str, stored: KVCacheDtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uneven chunks and a shared prefix, by the kernel, by torch and by two ranks."""
    rows, folder = sequences(97), build(family, tmp_path, vocab_size=97)
    wanted = reference_logits(folder, rows, stored, monkeypatch)
    plain = paged_logits(runner_of(folder, rows, "auto"), rows)
    runner = runner_of(folder, rows, stored)
    found = paged_logits(runner, rows)
    assert max(errors(found, wanted)) <= TOLERANCE
    assert max(errors(plain, wanted)) > TOLERANCE, "K and V are not rounded"
    runner.attention = TorchAttention(runner.cache)
    assert max(errors(paged_logits(runner, rows), wanted)) <= TOLERANCE
    ranks = in_memory(2, lambda group: paged_logits(runner_of(folder, rows, stored, group), rows))
    assert max(errors(ranks[0], wanted)) <= TOLERANCE


def test_bfloat16_under_a_model_in_fp32(tmp_path: Path) -> None:
    rows, folder = sequences(), build("llama", tmp_path)
    runner, plain = runner_of(folder, rows, "bfloat16"), runner_of(folder, rows, "auto")
    assert runner.cache.dtype == torch.bfloat16
    assert 2 * runner.bytes_per_block == plain.bytes_per_block
    found, wanted = paged_logits(runner, rows), paged_logits(plain, rows)
    error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True))
    assert 1e-5 < error < 0.02
    runner.attention = TorchAttention(runner.cache)
    for mine, other in zip(paged_logits(runner, rows), found, strict=True):
        assert (mine - other).abs().max() <= 1e-3 * max(1.0, other.abs().max().item())


def test_the_user_is_told(tmp_path: Path) -> None:
    loaded = load(ModelConfig(str(build("llama", tmp_path)), kv_cache_dtype="int8"))
    (shape, *_) = loaded.layers
    per_token = len(loaded.layers) * 2 * shape.kv_heads * (shape.key_size + 2)
    assert loaded.notes[0] == f"KV cache: {per_token} bytes per token"
    info = WorkerInfo(100, 16, 512, 300, kv_cache_dtype="int8")
    assert kv_summary(info).startswith("KV cache: 100 blocks of 16 tokens in int8 on every worker, 1600 tokens; ")


def test_measuring_runs_over_the_dtype_and_checks_of_compiled_graphs_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiled graph is compared with eager to 1e-5, which rounding to 8 bits would exceed."""
    runner = runner_of(build("llama", tmp_path), sequences(), "int8")
    seen: list[torch.dtype] = []
    make = runner.loaded.mode.attention
    mode = type("Mode", (), {"attention": lambda _, cache: seen.append(cache.dtype) or make(cache)})()
    runner.loaded = replace(runner.loaded, mode=mode)
    runner.measure_size(2)
    runner._trial(runner._eager, 7, 3)
    assert seen == [torch.int8, torch.float32]
