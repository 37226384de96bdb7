"""`quantization`: weights that are quantised while they are loaded, of targets, drafts and heads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from protos.config.engine import ModelConfig
from protos.errors import ConfigError, ModelError
from slipstream import LLM, SamplingParams
from tests.support.distributed.tensor_parallel import check
from tests.support.identity import Reference, assert_identical, generate
from tests.support.models import quantized, synthetic_layers
from tests.support.models.quantized_layers import meant, values_of
from tests.support.models.tiny_models import build
from workers.device import weight_bytes
from workers.model.loader import load
from workers.quantization.linear import QuantizedLinear
from workers.quantization.schemes import SCHEMES

pytestmark = pytest.mark.usefixtures("one_thread")

WIDE = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}


@pytest.fixture(params=SCHEMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("models") / "plain", **WIDE)


def test_the_values_are_those_of_the_scheme(plain: Path, name: str, tmp_path: Path) -> None:
    loaded = load(ModelConfig(model=str(plain), quantization=name))
    wanted = load_file(meant(plain, name, tmp_path / "meant") / "model.safetensors")
    found = values_of(loaded.model)
    assert found.keys() == wanted.keys()
    for key, weight in wanted.items():
        torch.testing.assert_close(found[key], weight, rtol=1e-5, atol=1e-6)
    layers = [layer for layer in loaded.model.modules() if isinstance(layer, torch.nn.Linear | QuantizedLinear)]
    assert f"weights are quantised to {name}: {len(layers)} of {len(layers)} linear layers" in loaded.notes


def test_memory_is_saved(tmp_path: Path, name: str) -> None:
    folder = build("llama", tmp_path, vocab_size=64, hidden_size=256, intermediate_size=512, tie_word_embeddings=False)
    whole, kept = (
        weight_bytes(load(ModelConfig(model=str(folder), quantization=scheme)).model) for scheme in (None, name)
    )
    assert kept < (0.18 if name == "int4" else 0.3) * whole


def test_tokens_are_those_of_transformers_on_these_values(plain: Path, name: str, tmp_path: Path) -> None:
    reference = Reference(meant(plain, name, tmp_path / "meant"))
    prompts = [[5, 9, 17, 5, 9, 17, 5, 9], [3, 1, 4, 1, 5, 9, 2, 6, 5], [40, 41, 42]]
    expected = [reference.greedy(prompt, 24) for prompt in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    head = synthetic_layers.eagle3(plain, kept=12).write(tmp_path / "head")
    methods: tuple[dict[str, Any] | None, ...] = (
        None,
        {"method": "ngram", "num_speculative_tokens": 3},
        {"model": str(plain), "quantization": name, "num_speculative_tokens": 3},
        {"method": "eagle3", "model": str(head), "quantization": name, "num_speculative_tokens": 3},
    )
    for speculative in methods:
        run = generate(plain, prompts, params, quantization=name, speculative_config=speculative)
        assert_identical(prompts, run.outputs, expected, reference)
        assert (run.proposed > 0) == (speculative is not None)


def test_two_ranks_hold_slices_of_the_same_values(plain: Path, name: str, tmp_path: Path) -> None:
    check(plain, 2, meant=meant(plain, name, tmp_path / "meant"), quantization=name)


def test_what_cannot_be_quantised_is_refused(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quantization is 'int8', but batch_invariant"):
        load(ModelConfig(model=str(plain), quantization="int8", batch_invariant=True))
    with pytest.raises(ModelError, match=r"quantization is 'awq', but .* is not stored so; int8, int4, fp8"):
        load(ModelConfig(model=str(plain), quantization="awq"))
    source = build("llama", tmp_path / "source", **WIDE)
    quantized.quantized(source, tmp_path / "stored", quantized.fp8_blocks(32, 32), BLOCKS, ("_proj.weight",))
    with pytest.raises(ModelError, match=r"quantization is 'int4', but .* is stored quantised \(fp8\); leave it out"):
        load(ModelConfig(model=str(tmp_path / "stored"), quantization="int4"))
    with pytest.raises(ConfigError, match="quantization must be one of 'int8', 'int4', 'fp8'"):
        LLM(str(plain), quantization="int3")
