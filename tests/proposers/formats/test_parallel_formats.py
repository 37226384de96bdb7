"""Checkpoints of P-EAGLE, DFlash and PARD, and the speculators format."""

from pathlib import Path
from typing import Any

import pytest
import torch

from proposers.formats import eagle3, pard
from proposers.formats.dflash import LayerAttention
from protos.errors import ModelError
from tests.support.models import synthetic, synthetic_layers, tiny_models
from tests.support.models.format_readers import VOCAB, opened, same


def test_p_eagle_is_eagle3_and_a_mask(target: Path) -> None:
    made = synthetic_layers.p_eagle(target, mask=7)
    spec, tensors = opened(made, target)
    assert spec.mask_token_id == 7
    assert tensors["mask_hidden"].equal(made.tensors["mask_hidden"].flatten())
    as_eagle3 = eagle3.read(made.config, synthetic.config_of(target), made.shapes)
    assert "mask_hidden" not in eagle3.load(as_eagle3, made.tensors)
    flat = made.holding({"mask_hidden": made.tensors["mask_hidden"].reshape(1, -1)})
    assert same(opened(flat, target)[1], tensors)
    with pytest.raises(ModelError, match=r"mask_hidden should be \[1, 1, 96\], but the checkpoint has \[1, 1, 95\]"):
        opened(made.holding({"mask_hidden": torch.zeros(1, 1, 95)}), target)
    with pytest.raises(ModelError, match="mask token is 96, but there are 96 embeddings"):
        opened(made.having(ptd_token_id=96), target)
    with pytest.raises(ModelError, match="names no mask token"):
        opened(made.having(ptd_token_id=None), target)


def test_dflash_reads_after_layers(target: Path) -> None:
    made = synthetic_layers.dflash(target, target_layers=(0, 5))
    spec, tensors = opened(made, target)
    assert (spec.inputs_of, spec.block_size, spec.mask_token_id) == ((1, 6), 4, 5)
    assert spec.attention == (LayerAttention(window=None, window_from_block=False, causal=False),) * 2
    assert spec.dims.qk_norm
    assert "layers.1.self_attn.q_norm.weight" in tensors
    sliding = made.having(layer_types=["sliding_attention", "full_attention"], sliding_window=9)
    assert [attention.window for attention in opened(sliding, target)[0].attention] == [9, None]
    with pytest.raises(ModelError, match="attention_sink_bias"):
        opened(made.having(dflash_config={**made.config["dflash_config"], "attention_sink_bias": True}), target)


SLIDES = {"use_sliding_window": True, "sliding_window": 9}


@pytest.mark.parametrize(
    ("layers", "windows"),
    [
        ({**SLIDES, "layer_types": ["full_attention", "sliding_attention"]}, [None, 10]),
        ({**SLIDES, "use_sliding_window": False, "layer_types": ["sliding_attention"] * 2}, [None, None]),
        ({**SLIDES, "sliding_window": None, "layer_types": ["sliding_attention"] * 2}, [None, None]),
        ({**SLIDES, "max_window_layers": 1}, [None, 10]),
        (SLIDES, [None, None]),
        ({"use_sliding_window": True, "max_window_layers": 0}, [4097, 4097]),
    ],
)
def test_windows_of_speculators_are_those_of_qwen3s_config(
    target: Path, layers: dict[str, Any], windows: list[int | None]
) -> None:
    """One more than stated, since they count from the block's first token, which is not among them."""
    made = synthetic_layers.dflash(target, **layers)
    attention = opened(synthetic_layers.speculators(made, target), target)[0].attention
    assert [one.window for one in attention] == windows
    assert [one.window_from_block for one in attention] == [window is not None for window in windows]
    assert [one.causal for one in attention] == [window is not None for window in windows]
    bidirectional = synthetic_layers.speculators(made, target, sliding_window_non_causal=True)
    assert not any(one.causal for one in opened(bidirectional, target)[0].attention)


@pytest.mark.parametrize("name", ["eagle3", "p_eagle", "dflash"])
def test_the_speculators_format_says_the_same(target: Path, name: str) -> None:
    write: Any = getattr(synthetic_layers, name)
    made = write(target)
    spec, tensors = opened(made, target)
    other, also = opened(synthetic_layers.speculators(made, target), target)
    assert same(also, tensors)
    assert {**vars(spec), "stored": 0} == {**vars(other), "stored": 0}


@pytest.mark.parametrize("kind", ["dflash2", "dspark", "eagle9"])
def test_kinds_of_speculators_that_are_not_available(target: Path, kind: str) -> None:
    from proposers.formats import speculators

    with pytest.raises(ModelError, match=f"'{kind}' is not supported; supported are dflash, eagle3, mtp, peagle"):
        speculators.method_of({"speculators_model_type": kind})


def test_pard_is_a_causal_model_and_a_mask(target: Path, tmp_path: Path) -> None:
    folder = synthetic_layers.pard(target, tmp_path, mask=9)
    config, tensors = synthetic.config_of(folder), synthetic.stored(folder)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    spec = pard.read(config, synthetic.config_of(target), shapes)
    assert (spec.mask_token_id, spec.vocab_size) == (9, VOCAB)
    assert same(pard.load(spec, tensors), tensors)
    with pytest.raises(ModelError, match=r"model\.norm\.weight should be \[32\]"):
        pard.read(config, config, {**shapes, "model.norm.weight": (31,)})


def test_a_tied_pard_model_may_leave_its_head_out(tmp_path: Path) -> None:
    base = tiny_models.build("llama", tmp_path / "base", tie_word_embeddings=True)
    folder = synthetic_layers.pard(base, tmp_path / "pard")
    config, tensors = synthetic.config_of(folder), synthetic.stored(folder)
    assert "lm_head.weight" not in tensors
    spec = pard.read(config, config, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    assert set(spec.stored) == set(tensors)
