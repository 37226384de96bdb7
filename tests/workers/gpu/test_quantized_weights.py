"""Weights that stay quantised on the pretended GPU: tokens of an engine on a CPU, memory, and products."""

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses import FakeTensorMode

from protos.config.engine import ModelConfig
from protos.errors import ConfigError
from slipstream import SamplingParams
from tests.support.gpu.engine import Served, one_ahead, only, serve
from tests.support.gpu.machine import interpreted_kernels, pretended_gpu
from tests.support.identity import generate
from tests.support.models import quantized as formats
from tests.support.models.tiny_models import build
from workers.device import weight_bytes
from workers.model.loader import load
from workers.quantization.experts import StackedLinear
from workers.quantization.linear import QuantizedEmbedding, QuantizedLinear
from workers.quantization.schemes import SCHEMES, int8
from workers.weights.quantizing import quantize_module

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 64}
GREEDY = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.0)
PROMPTS = [[3 + i, 5, 9, 11][: 2 + i % 3] for i in range(4)]
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
CUDA = torch.device("cuda", 0)


def served(model: Path, batch: int, **arguments: Any) -> Served:
    with pretended_gpu() as machine, interpreted_kernels(), only(batch, "greedy"):
        return serve(machine, model, PROMPTS[:batch], GREEDY, max_num_seqs=batch, **arguments)


def check(model: Path, batch: int = 2, **arguments: Any) -> Served:
    """Raise an error unless tokens are those of a CPU, and decoding rounds are graphs, launched once each."""
    found = served(model, batch, **arguments)
    assert found.outputs == generate(model, PROMPTS[:batch], GREEDY, max_model_len=64, **arguments).outputs
    rounds = found.decoding(batch)
    expected = [(graphs, 0) for graphs in one_ahead(len(rounds))]
    assert [(each.graphs, each.kernels.total()) for each in rounds] == expected
    return found


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("llama") / "model", num_hidden_layers=1, spread=0.2, **SIZES)


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt_oss")
    layers = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    source = build("gpt_oss", folder / "source", spread=0.2, **SIZES, **layers)
    formats.quantized(source, folder / "stored", formats.mxfp4, {"quant_method": "mxfp4"}, EXPERTS)
    return folder / "stored"


@pytest.mark.parametrize("name", ["int4", *(pytest.param(each, marks=pytest.mark.full) for each in ("int8", "fp8"))])
def test_weights_quantised_while_loading(llama: Path, name: str) -> None:
    check(llama, quantization=name)


def test_products_are_launched_for_every_layer(llama: Path) -> None:
    """Seven of the layer, one of the head; none of them has several spans."""
    found = served(llama, 1, quantization="int8", enforce_eager=True)
    assert found.decoding(1)[-1].kernels["product_kernel"] == 8


def test_experts_as_they_are_stored(mxfp4: Path) -> None:
    check(mxfp4)


@pytest.mark.full
def test_experts_in_groups_are_captured(mxfp4: Path) -> None:
    """Eight rows, of four experts."""
    check(mxfp4, batch=4)


def test_memory_is_that_of_the_quantised_weights(mxfp4: Path) -> None:
    """17 bytes for 32 weights of experts, as on a CPU."""
    on_cpu = load(ModelConfig(model=str(mxfp4)))
    with pretended_gpu(), interpreted_kernels():
        on_gpu = load(ModelConfig(model=str(mxfp4)))
        num_bytes = weight_bytes(on_gpu.model)
        stacks = [layer for layer in on_gpu.model.modules() if isinstance(layer, StackedLinear)]
        assert [weight_bytes(layer) for layer in stacks] == [4 * 64 * width // 32 * 17 for width in (128, 64)]
    assert all(weight.device.type == "cuda" for weight in on_gpu.model.parameters())
    assert num_bytes == weight_bytes(on_cpu.model)
    assert on_gpu.notes == on_cpu.notes


def test_without_triton_values_are_computed_with(llama: Path, tmp_path: Path) -> None:
    described = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
    formats.quantized(llama, tmp_path / "stored", formats.fp8_blocks(32, 32), described, ("_proj.weight",))
    with pretended_gpu(), mock.patch("workers.model.quantization.find_spec", lambda _name: None):
        loaded = load(ModelConfig(model=str(tmp_path / "stored")))
        with pytest.raises(ConfigError, match=r"quantization is 'int8', but .* need triton on a GPU; leave it out"):
            load(ModelConfig(model=str(llama), quantization="int8"))
    (note,) = (note for note in loaded.notes if "quantised" in note)
    assert "0 of 8 linear layers stay so" in note
    assert note.endswith("(products with quantised weights need triton on a GPU)")


@pytest.mark.parametrize("name", SCHEMES)
def test_a_layer_gives_what_it_gives_on_a_cpu(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = SCHEMES[name](torch.randn(33, 300, generator=generator))
    x = torch.randn(2, 3, 300, generator=generator)
    expected = QuantizedLinear(weight)(x)
    with pretended_gpu(), interpreted_kernels():
        found = QuantizedLinear(weight.to(CUDA))(x.to(CUDA)).cpu()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", SCHEMES)
def test_loaded_modules_are_quantised_where_they_are(name: str) -> None:
    """As those of learned proposers."""
    plain = torch.nn.Sequential(torch.nn.Linear(96, 40)).requires_grad_(False)
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(0))
    on_cpu = copy.deepcopy(plain)
    quantize_module(on_cpu, SCHEMES[name], ())
    with pretended_gpu(), interpreted_kernels():
        on_gpu = plain.to(CUDA)
        assert quantize_module(on_gpu, SCHEMES[name], ()) == 1
        found = on_gpu(x.to(CUDA)).cpu()
    torch.testing.assert_close(found, on_cpu(x), rtol=1e-5, atol=1e-4)


def test_an_embedding_gives_the_rows_of_its_head() -> None:
    weight = int8(torch.randn(50, 40, generator=torch.Generator().manual_seed(0)))
    ids = torch.tensor([[0, 3, 49], [17, 4, 4]])
    expected = QuantizedEmbedding(QuantizedLinear(weight), torch.float32)(ids)
    with pretended_gpu():
        found = QuantizedEmbedding(QuantizedLinear(weight.to(CUDA)), torch.float32)(ids.to(CUDA)).cpu()
    assert torch.equal(found, expected)


def test_shapes_are_known_without_computing() -> None:
    with FakeTensorMode():
        layer = QuantizedLinear(int8(torch.randn(33, 300)))
        assert layer(torch.randn(2, 3, 300, dtype=torch.bfloat16)).shape == (2, 3, 33)
