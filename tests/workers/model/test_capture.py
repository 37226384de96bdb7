"""Captured hidden states equal those that `transformers` returns."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from protos.config.engine import ModelConfig
from protos.errors import ModelError
from protos.layers import FeatureSpec
from tests.support.models import tiny_models
from workers.attention.batch import Batch
from workers.model.capture import Taps
from workers.model.loader import load
from workers.model.runner import ModelRunner
from workers.slots import SlotTable

TEXTS = [[5, 6, 7, 8, 9], [10, 11, 12]]
INSIDE = FeatureSpec("all", (2, 0, 3))
AT_THE_END = FeatureSpec("last")
FAMILIES = ("llama", "gemma2", "gpt2", "opt", "deepseek_v3")


def tapped(folder: Path, spec: FeatureSpec) -> ModelRunner:
    slots = SlotTable(2, 32, 4)
    slots.blocks[0, :8], slots.blocks[1, :8] = range(8), range(8, 16)
    loaded = load(ModelConfig(str(folder), dtype="float32"))
    return ModelRunner(loaded, slots, 16, 4, Taps(loaded.model, spec))


def features(runner: ModelRunner) -> torch.Tensor:
    lengths = np.array([len(text) for text in TEXTS])
    batch = Batch(np.array([0, 1]), np.zeros(2, np.int64), lengths, np.array([*TEXTS[0], *TEXTS[1]]))
    logits_NV, features_TF = runner.run(batch, np.cumsum(lengths) - 1)
    assert logits_NV.shape[0] == len(TEXTS)
    assert features_TF is not None
    return features_TF.clone()


def wanted(folder: Path, spec: FeatureSpec) -> torch.Tensor:
    """Inputs of layers, or the last state. `transformers` does not return the last layer's output before the norm."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    found = []
    with torch.inference_mode():
        for text in TEXTS:
            states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
            found.append(torch.cat([states[place][0] for place in spec.inputs_of or (-1,)], -1))
    return torch.cat(found)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", [FeatureSpec("all", (2, 0, 1)), AT_THE_END], ids=["inside", "at the end"])
def test_eager(family: str, spec: FeatureSpec, tmp_path: Path) -> None:
    folder = tiny_models.build(family, tmp_path / family)
    torch.testing.assert_close(features(tapped(folder, spec)), wanted(folder, spec), atol=2e-5, rtol=1e-4)


def test_after_the_last_layer_and_before_the_norm(tmp_path: Path) -> None:
    folder = tiny_models.build("llama", tmp_path / "llama")
    runner = tapped(folder, FeatureSpec("all", (3,)))
    normed = runner.loaded.model.model.norm(features(runner))
    torch.testing.assert_close(normed, wanted(folder, AT_THE_END), atol=2e-5, rtol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("spec", [INSIDE, AT_THE_END], ids=["inside", "at the end"])
def test_compiled(spec: FeatureSpec, tmp_path: Path) -> None:
    runner = tapped(tiny_models.build("llama", tmp_path / "llama"), spec)
    eager = features(runner)
    runner.compile_into(tmp_path, lambda: None)
    runner.load_compiled(tmp_path)
    torch.testing.assert_close(features(runner), eager, atol=2e-5, rtol=1e-4)


def test_layers_that_are_not_there(tmp_path: Path) -> None:
    folder = tiny_models.build("llama", tmp_path / "llama")
    with pytest.raises(ModelError, match=r"inputs of layers \[4\]; the target has 3 layers"):
        tapped(folder, FeatureSpec("all", (1, 4)))
