"""Attention over latents gives what the expanded attention of transformers gives."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from protos.layers import LayerShape
from tests.support.models.every_family import build_any
from tests.workers.attention.test_tree_attention import OneRow, rows_of
from workers.attention.backend import NAME, run_with
from workers.attention.kv import KVCache, bytes_per_token
from workers.attention.latent import Latents, attend_over_latents, with_latents
from workers.attention.torch import TorchAttention
from workers.device import weight_bytes
from workers.model.probe import probe
from workers.quantization.schemes import SCHEMES
from workers.weights.quantizing import quantize_module

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
TOKENS = torch.tensor([[5, 17, 3, 42, 8, 30, 11, 2, 19]])
FAMILIES = ("deepseek_v2", "deepseek_v3", "minicpm3", "youtu", "glm4_moe_lite", "axk1")


def made(family: str, folder: Path) -> Any:
    """A tiny random model, in fp32."""
    return AutoModelForCausalLM.from_pretrained(
        build_any(family, folder), dtype=torch.float32, attn_implementation="eager"
    )


def paged(model: Any, cut: int) -> torch.Tensor:
    """Return the logits of `TOKENS` over a paged cache: of the first *cut* tokens, and of the others after them."""
    model.config._attn_implementation = NAME
    shapes = with_latents(model, probe(model, "it"))
    backend, found = TorchAttention(KVCache(shapes, 4, 8, torch.float32, CPU)), []
    for start, end in ((0, cut), (cut, TOKENS.shape[1])):
        backend.plan(rows_of([OneRow(start, end - start)]))
        positions = torch.arange(start, end).unsqueeze(0)
        given = {"input_ids": TOKENS[:, start:end], "position_ids": positions, "use_cache": False}
        found.append(run_with(backend, lambda given=given: model(**given).logits))
    return torch.cat(found, 1)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_logits_are_those_of_expanded_attention(family: str, tmp_path: Path) -> None:
    model = made(family, tmp_path)
    expected = model(input_ids=TOKENS).logits
    attend_over_latents(model, CUDA)
    again = model(input_ids=TOKENS).logits  # its own code still expands
    assert torch.equal(again, expected)
    torch.testing.assert_close(paged(model, 6), expected, rtol=1e-4, atol=1e-4)
    shapes = with_latents(model, probe(model, "it"))
    assert set(shapes) == {LayerShape(1, 16, 12, values_in_keys=True)}
    assert len(shapes) == model.config.num_hidden_layers


@torch.inference_mode()
def test_a_quantised_expansion_is_replaced_by_the_values_it_stands_for(tmp_path: Path) -> None:
    model = made("deepseek_v2", tmp_path)
    quantize_module(model, SCHEMES["int8"], ())
    attention = model.model.layers[0].self_attn
    expected, quantised = model(input_ids=TOKENS).logits, weight_bytes(attention.kv_b_proj)
    attend_over_latents(model, CUDA)
    assert isinstance(attention.kv_b_proj, torch.nn.Linear)
    assert weight_bytes(attention.kv_b_proj) > quantised
    torch.testing.assert_close(paged(model, 6), expected, rtol=1e-4, atol=1e-4)


def test_cpus_expand(tmp_path: Path) -> None:
    model = made("deepseek_v2", tmp_path)
    attend_over_latents(model, CPU)
    assert not any(isinstance(getattr(module, "expand_kv", None), Latents) for module in model.modules())
    assert paged(model, 6).shape[1] == TOKENS.shape[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_the_cache_holds_values_once(dtype: torch.dtype) -> None:
    shape = LayerShape(2, 16, 12, values_in_keys=True)
    separate = LayerShape(2, 16, 12)
    caches = [KVCache((each,), 4, 8, dtype, CPU) for each in (shape, separate)]
    key_TGD = torch.randn(5, 2, 16, generator=torch.Generator().manual_seed(0))
    at_T, moves = torch.tensor([3, 9, 10, 30, 17]), torch.tensor([[3, 0], [30, 31]])
    for cache in caches:
        cache.write(0, at_T, key_TGD, key_TGD[..., :12])
        cache.move(moves.numpy())
    everywhere = torch.arange(32)
    once, twice = (
        [pages[0].tokens(everywhere, torch.float32) for pages in (c.key_pages, c.value_pages)] for c in caches
    )
    assert torch.equal(once[0], twice[0])
    assert torch.equal(once[1], once[0][..., :12])
    assert caches[0].values[0].data_ptr() == caches[0].keys[0].data_ptr()
    scale = 2 if dtype == torch.int8 else 0
    assert bytes_per_token([shape], dtype) == 2 * (16 * dtype.itemsize + scale)
    assert bytes_per_token([separate], dtype) == 2 * (28 * dtype.itemsize + 2 * scale)
