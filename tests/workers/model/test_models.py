"""Every family, fed in uneven chunks over paged KV, against the plain `transformers` forward."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from protos.config.engine import ModelConfig
from protos.layers import LayerShape
from protos.messages import NewSequence, RoundPlan, Row, Sampling
from tests.support.models.tiny_models import FAMILIES, build
from workers.attention.backend import AttentionBackend
from workers.attention.batch import Batch
from workers.attention.kv import bytes_per_block
from workers.attention.native import NativeAttention
from workers.attention.torch import TorchAttention
from workers.model.loader import load
from workers.model.runner import ModelRunner
from workers.native.build import load_function
from workers.slots import SlotTable

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK = 4
SLOTS = 4
LENGTHS = (37, 21, 31, 9)
PREFIX = 8
"""Rows 0 and 2 share their first PREFIX tokens, and the blocks that hold them."""

CHUNKS = (
    ((0, 8), (1, 5), (3, 1)),
    ((1, 1), (0, 17)),
    ((2, 3), (3, 2), (0, 1), (1, 6)),
    ((0, 1), (1, 1), (2, 1), (3, 1)),
    ((2, 18), (3, 1)),
    ((0, 5), (1, 5), (3, 4)),
    ((0, 5), (1, 3), (2, 1)),
)
"""Rounds of (slot, tokens); row 2 starts after the shared prefix."""


def sequences(vocab: int = 96) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    rows = [rng.integers(3, vocab, n) for n in LENGTHS]
    rows[2][:PREFIX] = rows[0][:PREFIX]
    return rows


def fill(slots: SlotTable, rows: list[np.ndarray], num_blocks: int, block: int = BLOCK) -> None:
    """Give every row scattered blocks, descending ids included; row 2 shares row 0's prefix blocks."""
    free = list(np.random.default_rng(2).permutation(num_blocks))
    tables = [[int(free.pop()) for _ in range(-(-len(row) // block))] for row in rows]
    if len(rows) > 2:
        tables[2][: PREFIX // block] = tables[0][: PREFIX // block]
    new = [NewSequence(i, row.tolist(), len(row), Sampling(seed=0)) for i, row in enumerate(rows)]
    grown = [
        Row(i, 0, 1, len(row), new_block_ids=table, new_block_versions=[0] * len(table))
        for i, (row, table) in enumerate(zip(rows, tables, strict=True))
    ]
    slots.apply(RoundPlan(0, grown, new))


def paged_logits(runner: ModelRunner, rows: list[np.ndarray]) -> list[torch.Tensor]:
    """Feed CHUNKS and return each row's logits, `[tokens fed, V]`."""
    done = np.array([0, 0, PREFIX, 0])
    parts: list[list[torch.Tensor]] = [[] for _ in rows]
    for chunk in CHUNKS:
        slots_R = np.array([slot for slot, _ in chunk])
        lengths_R = np.array([length for _, length in chunk])
        batch = Batch.from_history(runner.slots.tokens, slots_R, done[slots_R], lengths_R)
        logits = runner.forward(batch, np.arange(len(batch.tokens_T)))
        for slot, part in zip(slots_R, logits.split(lengths_R.tolist()), strict=True):
            parts[slot].append(part.clone())
        done[slots_R] += lengths_R
    assert done.tolist() == list(LENGTHS)
    return [torch.cat(part) for part in parts]


def batch_of(runner: ModelRunner, slots: list[int], starts: list[int], lengths: list[int]) -> Batch:
    return Batch.from_history(runner.slots.tokens, np.array(slots), np.array(starts), np.array(lengths))


def feed(runner: ModelRunner, slots: list[int], starts: list[int], lengths: list[int]) -> torch.Tensor:
    """Return the logits of every token fed."""
    return runner.forward(batch_of(runner, slots, starts, lengths), np.arange(sum(lengths))).clone()


def make_runner(folder: Path, rows: list[np.ndarray], num_blocks: int = 40, dtype: str = "auto") -> ModelRunner:
    loaded = load(ModelConfig(model=str(folder), device="cpu", dtype=dtype))  # type: ignore[arg-type]
    slots = SlotTable(SLOTS, 64, BLOCK)
    fill(slots, rows, num_blocks)
    return ModelRunner(loaded, slots, num_blocks, BLOCK)


def reference_logits(folder: Path, rows: list[np.ndarray], attention: str) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).eval()
    with torch.no_grad():
        return [model(input_ids=torch.from_numpy(row)[None], use_cache=False).logits[0] for row in rows]


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_equal_the_plain_forward(family: str, tmp_path: Path) -> None:
    rows = sequences()
    folder = build(family, tmp_path)
    ours = paged_logits(make_runner(folder, rows), rows)
    theirs = reference_logits(folder, rows, "eager")
    for slot, (mine, reference) in enumerate(zip(ours, theirs, strict=True)):
        wanted = reference[PREFIX:] if slot == 2 else reference
        assert torch.isfinite(mine).all()
        assert (mine - wanted).abs().max() <= 2e-5 * max(1.0, wanted.abs().max().item()), (family, slot)


def test_torch_attention_equals_the_kernel(tmp_path: Path) -> None:
    """The fallback without a compiler, and on other devices; soft caps, windows and sinks included."""
    rows = sequences()
    for family in ("gemma2", "gpt_oss", "deepseek_v3", "gpt_bigcode"):
        folder = build(family, tmp_path / family)
        runner = make_runner(folder, rows)
        fast = paged_logits(runner, rows)
        runner.attention = TorchAttention(runner.cache)
        for mine, other in zip(fast, paged_logits(runner, rows), strict=True):
            assert (mine - other).abs().max() <= 2e-5 * max(1.0, other.abs().max().item()), family


@pytest.mark.parametrize("backend", [TorchAttention, NativeAttention])
def test_what_strangers_left_in_the_cache_is_never_read(backend: type[AttentionBackend], tmp_path: Path) -> None:
    rows = sequences()
    runner = make_runner(build("gemma2", tmp_path), rows)
    expected = paged_logits(runner, rows)
    for pages in (*runner.cache.keys, *runner.cache.values):
        pages.fill_(torch.nan)
    runner.attention = backend(runner.cache)  # type: ignore[call-arg]
    for mine, other in zip(paged_logits(runner, rows), expected, strict=True):
        assert (mine - other).abs().max() <= 2e-5 * max(1.0, other.abs().max().item())


@pytest.mark.parametrize("backend", [TorchAttention, NativeAttention])
def test_a_broken_row_does_not_disturb_its_neighbours(backend: type[AttentionBackend], tmp_path: Path) -> None:
    rows = sequences()[:2]
    runner = make_runner(build("llama", tmp_path), rows)
    runner.attention = backend(runner.cache)  # type: ignore[call-arg]
    feed(runner, [0, 1], [0, 0], [20, 20])
    expected = feed(runner, [0, 1], [20, 20], [1, 1])
    block = int(runner.slots.blocks[0, 1])
    runner.cache.keys[0][block] = torch.nan
    found = feed(runner, [0, 1], [20, 20], [1, 1])
    assert torch.isnan(found[0]).all()
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("backend", [TorchAttention, NativeAttention])
def test_bfloat16_is_as_near_as_bfloat16_gets(backend: type[AttentionBackend], tmp_path: Path) -> None:
    rows = sequences()
    folder = build("llama", tmp_path)
    exact = reference_logits(folder, rows, "eager")
    runner = make_runner(folder, rows, dtype="bfloat16")
    runner.attention = backend(runner.cache)  # type: ignore[call-arg]
    for slot, mine in enumerate(paged_logits(runner, rows)):
        wanted = exact[slot][PREFIX:] if slot == 2 else exact[slot]
        assert mine.dtype == torch.float32
        assert (mine - wanted).abs().mean() <= 0.02 * wanted.abs().max()


def test_only_wanted_logits_come_back_in_order(tmp_path: Path) -> None:
    rows = sequences()[:2]
    runner = make_runner(build("granite", tmp_path), rows)
    everything = feed(runner, [0, 1], [0, 0], [9, 6]).clone()
    batch = batch_of(runner, [0, 1], [0, 0], [9, 6])
    wanted = np.array([14, 8])
    assert torch.allclose(runner.forward(batch, wanted), everything[wanted], atol=1e-5)
    assert runner.forward(batch, np.array([3])).shape == (1, 96)
    assert runner.forward(batch, np.array([], np.int64)).shape == (0, 96)


def test_blocks_are_sized_from_heads() -> None:
    layers = (LayerShape(2, 8, 6), LayerShape(1, 8, 8))
    assert bytes_per_block(layers, 4, torch.bfloat16) == 4 * (2 * 14 + 16) * 2


def test_a_model_refuses_to_run_without_its_runner(tmp_path: Path) -> None:
    model = load(ModelConfig(model=str(build("llama", tmp_path)))).model
    with pytest.raises(RuntimeError, match="only through ModelRunner"):
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64))


def test_without_a_compiler_everything_runs_in_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = sequences()[:1]
    monkeypatch.setattr("shutil.which", lambda _: None)
    load_function.cache_clear()
    runner = make_runner(build("llama", tmp_path), rows)
    load_function.cache_clear()
    assert isinstance(runner.attention, TorchAttention)
    assert torch.isfinite(feed(runner, [0], [0], [20])).all()
