"""What learned proposers are built from: the target's ends as the target itself uses them, and tensors read safely."""

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from protos.errors import ModelError
from tests.support.models import tiny_models
from workers.draft.weights import CheckpointEnds, LoadedEnds, TargetEnds, read_tensors

CPU = torch.device("cpu")
FAMILIES = ("llama", "gemma2", "cohere", "granite", "opt", "gpt2", "mixtral", "gpt_bigcode", "phi")
"""Plain, capped, scaled, divided; decoders in other places, heads with a bias, routers."""


def assert_ends(ends: TargetEnds, folder: Path) -> None:
    """The logits of the last states are the model's own, and the embedding is what the first layer reads."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids_1T = torch.arange(3, 12)[None]
    with torch.inference_mode():
        output = model(ids_1T, output_hidden_states=True)
        torch.testing.assert_close(ends.head()(output.hidden_states[-1][0]), output.logits[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ends.embedding()(ids_1T), model.get_input_embeddings()(ids_1T))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_ends_are_read_alone(family: str, tied: bool, tmp_path: Path) -> None:
    folder = tiny_models.build(family, tmp_path / family, tie_word_embeddings=tied)
    ends = CheckpointEnds(folder, family, torch.float32, CPU)
    assert_ends(ends, folder)


def test_a_whole_target_lends_what_it_has(tmp_path: Path) -> None:
    folder = tiny_models.build("gemma2", tmp_path / "gemma2")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ends = LoadedEnds(model)
    assert_ends(ends, folder)
    assert ends.embedding() is model.get_input_embeddings()
    model(torch.ones(1, 3, dtype=torch.int64))  # lending its head has not touched the model


def test_safetensors_win_and_prefixes_are_picked(tmp_path: Path) -> None:
    save_file({"a.x": torch.ones(2), "b.x": torch.zeros(2)}, tmp_path / "model.safetensors")
    torch.save({"a.x": torch.full((2,), 7.0)}, tmp_path / "old.pt")
    assert {name: tensor.tolist() for name, tensor in read_tensors(tmp_path, "a.")} == {"a.x": [1.0, 1.0]}


@pytest.mark.parametrize("zipped", [True, False])
def test_what_torch_saved_is_read_without_safetensors(zipped: bool, tmp_path: Path) -> None:
    torch.save({"0.weight": torch.arange(3)}, tmp_path / "heads.pt", _use_new_zipfile_serialization=zipped)
    (tmp_path / "training_args.bin").write_bytes(b"not weights")
    assert {name: tensor.tolist() for name, tensor in read_tensors(tmp_path)} == {"0.weight": [0, 1, 2]}


class Payload:
    """Would run when unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return print, ("loaded",)


def test_code_in_a_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"weight": Payload()}, tmp_path / "heads.pt")
    with pytest.raises(ModelError, match=r"heads.pt holds more than tensors"):
        dict(read_tensors(tmp_path))
    (tmp_path / "heads.pt").write_bytes(pickle.dumps(Payload(), protocol=2))
    with pytest.raises(ModelError, match=r"heads.pt"):
        dict(read_tensors(tmp_path))
    assert "loaded" not in capsys.readouterr().out


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there are no weights"):
        dict(read_tensors(tmp_path))
