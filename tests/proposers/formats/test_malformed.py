"""Malformed checkpoints of every format are refused, with the tensor's name and both shapes."""

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from proposers import registry
from protos.config.engine import SpeculativeConfig
from protos.errors import ModelError
from tests.support.models import synthetic, synthetic_layers, tiny_models
from tests.support.models.synthetic import Synthetic
from workers.draft.weights import DraftCheckpoint, LoadedEnds

WIDTH, VOCAB = 32, 96
MADE: dict[str, Callable[[Path], Synthetic]] = {
    "medusa": synthetic.medusa,
    "hydra": synthetic.hydra,
    "mlp_speculator": synthetic.mlp_speculator,
    "recurrent": synthetic.recurrent,
    "eagle": synthetic_layers.eagle,
    "eagle3": synthetic_layers.eagle3,
    "p_eagle": synthetic_layers.p_eagle,
    "dflash": synthetic_layers.dflash,
}
CHECKPOINTS = (*MADE, "pard", "mtp")
# One tensor of each format that is as wide as the target's states, by its stored name and its canonical one.
VICTIMS = {
    "medusa": ("1.0.linear.weight", "blocks.1.0.weight"),
    "hydra": ("hydra_mlp.1.1.linear.weight", "blocks.1.1.weight"),
    "mlp_speculator": ("speculator.proj.0.weight", "proj.0.weight"),
    "recurrent": ("rnn_u.weight", "rnn_u.weight"),
    "eagle": ("layers.0.self_attn.q_proj.weight",) * 2,
    "eagle3": ("midlayer.self_attn.o_proj.weight", "layers.0.self_attn.o_proj.weight"),
    "p_eagle": ("fc.weight", "fc.weight"),
    "dflash": ("fc.weight", "fc.weight"),
    "pard": ("model.layers.1.mlp.up_proj.weight",) * 2,
    "mtp": ("model.layers.3.eh_proj.weight", "layers.0.proj.weight"),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("llama", tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def with_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_layers.with_mtp("glm4_moe", tmp_path_factory.mktemp("models") / "heads")


@pytest.fixture
def sound(method: str, target: Path, with_heads: Path, tmp_path: Path) -> Synthetic:
    """A checkpoint of *method* that nothing is wrong with."""
    if method in MADE:
        return MADE[method](target)
    folder = with_heads if method == "mtp" else synthetic_layers.pard(target, tmp_path / "pard")
    return Synthetic(synthetic.config_of(folder), synthetic.stored(folder), method=method)


def build(made: Synthetic, folder: Path, base: Path) -> Any:
    """Build the module from what was written, as a worker would."""
    made.write(folder)
    own = made.method != "mtp"
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    parts = DraftCheckpoint(
        folder if own else None,
        folder,
        made.config,
        synthetic.config_of(base),
        LoadedEnds(model),
        torch.float32,
        torch.device("cpu"),
        "eager",
    )
    proposer: Any = registry.load(made.method)
    return proposer.build(SpeculativeConfig(made.method, 3, model=str(folder) if own else None), parts)


def refusal(made: Synthetic, folder: Path, base: Path) -> str:
    with pytest.raises(ModelError) as caught:
        build(made, folder, base)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def base(method: str, target: Path, with_heads: Path) -> Path:
    return with_heads if method == "mtp" else target


@pytest.mark.parametrize("method", CHECKPOINTS)
def test_sound_ones_are_built(sound: Synthetic, tmp_path: Path, base: Path) -> None:
    assert build(sound, tmp_path / "draft", base).vocab_size <= VOCAB


@pytest.mark.parametrize("method", CHECKPOINTS)
def test_a_missing_tensor(method: str, sound: Synthetic, tmp_path: Path, base: Path) -> None:
    stored, canonical = VICTIMS[method]
    shape = list(sound.tensors[stored].shape)
    said = refusal(sound.without(stored), tmp_path / "draft", base)
    assert f"{canonical} should be {shape}, but the checkpoint has no such tensor" in said


@pytest.mark.parametrize("method", CHECKPOINTS)
def test_a_wrong_shape(method: str, sound: Synthetic, tmp_path: Path, base: Path) -> None:
    stored, _ = VICTIMS[method]
    rows, columns = sound.tensors[stored].shape
    said = refusal(sound.holding({stored: torch.zeros(rows, columns + 1)}), tmp_path / "draft", base)
    assert f"{stored} should be [{rows}, {columns}], but the checkpoint has [{rows}, {columns + 1}]" in said


@pytest.mark.parametrize("method", CHECKPOINTS)
def test_an_extra_tensor(method: str, sound: Synthetic, tmp_path: Path, base: Path) -> None:
    extra = "model.layers.3.surprise.weight" if method == "mtp" else "surprise.weight"
    said = refusal(sound.holding({extra: torch.zeros(2, 3)}), tmp_path / "draft", base)
    assert f"{extra} [2, 3] has no place in this format" in said


@pytest.mark.parametrize("method", CHECKPOINTS)
def test_quantised_weights(method: str, sound: Synthetic, tmp_path: Path, base: Path) -> None:
    stored, _ = VICTIMS[method]
    packed = sound.without(stored).holding({stored.replace(".weight", ".weight_packed"): torch.zeros(2, 3)})
    assert "quantised weights" in refusal(packed, tmp_path / "packed", base)
    described = sound.having(quantization_config={"quant_method": "compressed-tensors"})
    assert "quantised (compressed-tensors)" in refusal(described, tmp_path / "described", base)


@pytest.mark.parametrize("method", [method for method in MADE if method not in ("medusa", "hydra")])
def test_a_wrong_vocabulary_in_the_config(sound: Synthetic, tmp_path: Path, base: Path) -> None:
    said = refusal(sound.having(vocab_size=97), tmp_path / "draft", base)
    assert "made for a vocabulary of 97, but the target has 96" in said


@pytest.mark.parametrize(
    ("method", "stored"),
    [
        ("medusa", "2.1.weight"),
        ("hydra", "hydra_lm_head.2.weight"),
        ("mlp_speculator", "speculator.emb.1.weight"),
        ("recurrent", "lm_head.2.weight"),
        ("eagle", "embed_tokens.weight"),
        ("eagle3", "t2d"),
        ("p_eagle", "t2d"),
        ("dflash", "embed_tokens.weight"),
        ("pard", "model.embed_tokens.weight"),
        ("mtp", "model.layers.3.shared_head.head.weight"),
    ],
)
def test_a_wrong_vocabulary_in_the_tensors(stored: str, sound: Synthetic, tmp_path: Path, base: Path) -> None:
    wide = sound.tensors.get(stored, torch.zeros(VOCAB, WIDTH))[:90]
    said = refusal(sound.holding({stored: wide}), tmp_path / "draft", base)
    assert f"{stored} should be [{VOCAB}" in said
    assert "but the checkpoint has [90" in said


@pytest.mark.parametrize("method", [*MADE, "pard"])
def test_a_pickle_that_runs_code(method: str, sound: Synthetic, tmp_path: Path, base: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "sprung",)

    folder = tmp_path / "draft"
    Synthetic(sound.config, {}, "empty.pt", method).write(folder)
    stored, _ = VICTIMS[method]
    (folder / "empty.pt").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({stored: Trap()}, protocol=2))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    parts = DraftCheckpoint(
        folder,
        folder,
        sound.config,
        synthetic.config_of(base),
        LoadedEnds(model),
        torch.float32,
        torch.device("cpu"),
        "eager",
    )
    proposer: Any = registry.load(method)
    with pytest.raises(ModelError, match=re.escape("would run code when loaded")):
        proposer.build(SpeculativeConfig(method, 3, model=str(folder)), parts)
    assert not (tmp_path / "sprung").exists()


def test_a_damaged_target_says_so(tmp_path: Path, target: Path) -> None:
    made = synthetic.medusa(target)
    folder = made.write(tmp_path / "draft")
    (folder / "medusa_lm_head.pt").unlink()
    save_file({"0.0.linear.weight": torch.zeros(WIDTH, WIDTH)}, folder / "heads.safetensors")
    (folder / "heads.safetensors").write_bytes((folder / "heads.safetensors").read_bytes()[:100])
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    parts = DraftCheckpoint(
        folder,
        folder,
        made.config,
        synthetic.config_of(target),
        LoadedEnds(model),
        torch.float32,
        torch.device("cpu"),
        "eager",
    )
    medusa: Any = registry.load("medusa")
    with pytest.raises(ModelError, match="cannot be read"):
        medusa.build(SpeculativeConfig("medusa", 3, model=str(folder)), parts)
