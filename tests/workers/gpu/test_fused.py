"""Layers that kernels compute, interpreted, give the logits of `transformers`' own; only known layers are fused."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from triton.runtime.interpreter import InterpretedFunction

from protos.config.engine import ModelConfig
from tests.support.distributed.ranks import in_memory
from tests.support.distributed.tensor_parallel import VOCAB, runner_of
from tests.support.models.tiny_models import build, settings
from tests.workers.model.test_models import PREFIX, paged_logits, reference_logits, sequences
from workers.distributed.groups import Group
from workers.gpu.fused import fuse_layers
from workers.model.loaded import LoadedModel
from workers.model.loader import load
from workers.model.self_check import FIRST, SECOND, TREE, _paged, _plain, self_check

pytestmark = pytest.mark.usefixtures("one_thread")

KNOWN = ("llama", "mistral", "qwen2", "qwen3")


def loaded(family: str, folder: Path, dtype: str = "float32", layers: int = 1, **overrides: Any) -> LoadedModel:
    model = build(family, folder / family, num_hidden_layers=layers, **overrides)
    return load(ModelConfig(model=str(model), dtype=dtype, device="cpu"))


@pytest.mark.parametrize("family", KNOWN)
def test_known_layers_compute_the_same(family: str, tmp_path: Path) -> None:
    layers = 2 if family == "qwen2" else 1  # its second one has a window
    model = loaded(family, tmp_path, layers=layers)
    ids = torch.arange(FIRST + SECOND + len(TREE.positions)).numpy() * 7 % 90 + 3
    parts = ids[:FIRST], ids[FIRST : FIRST + SECOND], ids[FIRST + SECOND :]
    with torch.inference_mode():
        before = _paged(model, *parts)
        own = _plain(model, *parts)
        assert fuse_layers(model.model) == layers
        torch.testing.assert_close(_paged(model, *parts), before, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(_plain(model, *parts), own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("family", "ranks"), [("qwen2", 2), ("qwen3", 4)])
def test_known_layers_of_several_ranks_compute_the_same(
    family: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen2 has biases; of four ranks each has a copy of one of two K/V heads."""
    folder, rows = build(family, tmp_path, vocab_size=VOCAB), sequences(VOCAB)
    expected = reference_logits(folder, rows, "eager")
    interpreter, run = threading.Lock(), InterpretedFunction.run

    def one_at_a_time(kernel: Any, *args: Any, **options: Any) -> None:
        with interpreter:  # it is not made for threads
            run(kernel, *args, **options)

    monkeypatch.setattr(InterpretedFunction, "run", one_at_a_time)

    def work(group: Group) -> list[torch.Tensor]:
        runner = runner_of(folder, group, rows)
        assert fuse_layers(runner.module) == runner.loaded.model.config.num_hidden_layers
        return paged_logits(runner, rows)

    for slot, (found, reference) in enumerate(zip(in_memory(ranks, work)[0], expected, strict=True)):
        wanted = reference[PREFIX:] if slot == 2 else reference
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_half_precision_the_check_of_a_loaded_model_passes(dtype: str, tmp_path: Path) -> None:
    model = loaded("qwen3", tmp_path, dtype)
    assert fuse_layers(model.model) == 1
    self_check(model, "qwen3")


def test_the_check_of_a_loaded_model_finds_a_wrong_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded("llama", tmp_path)
    fuse_layers(model.model)
    monkeypatch.setattr("workers.gpu.fused.swiglu", lambda gate_up_TX: gate_up_TX[:, : gate_up_TX.shape[1] // 2])
    with pytest.raises(Exception, match="cannot be served"):
        self_check(model, "llama")


@pytest.mark.parametrize("family", ["gemma2", "granite", "phi3", "qwen3_moe", "gpt2"])
def test_other_layers_stay(family: str, tmp_path: Path) -> None:
    described = AutoConfig.for_model(family, **settings(family))
    assert fuse_layers(AutoModelForCausalLM.from_config(described)) == 0


def test_changed_layers_stay(tmp_path: Path) -> None:
    """Another activation, or a hook on a part."""
    assert fuse_layers(loaded("llama", tmp_path, hidden_act="gelu").model) == 0
    model = loaded("llama", tmp_path, layers=3).model
    layers: Any = model.get_submodule("model.layers")
    layers[0].mlp.down_proj.register_forward_hook(lambda *_: None)  # is called as a module
    layers[1].mlp.up_proj.register_forward_hook(lambda *_: None)
    assert fuse_layers(model) == 2


def test_nothing_is_fused_on_a_cpu(tmp_path: Path) -> None:
    layers: Any = loaded("llama", tmp_path).model.get_submodule("model.layers")
    assert not any("forward" in vars(layer) for layer in layers)


def test_merged_weights_are_not_kept_twice(tmp_path: Path) -> None:
    model = loaded("llama", tmp_path).model
    fuse_layers(model)
    attention: Any = model.get_submodule("model.layers.0.self_attn")
    storages = {part.weight.untyped_storage().data_ptr() for part in (attention.q_proj, attention.k_proj)}
    assert len(storages) == 1
