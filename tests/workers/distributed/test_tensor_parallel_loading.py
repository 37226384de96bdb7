"""Reading one rank's shard of a checkpoint, and errors for models that cannot be split."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from protos.config.engine import ModelConfig
from protos.errors import ModelError
from tests.support.distributed.ranks import in_memory
from tests.support.distributed.tensor_parallel import VOCAB, check, share
from tests.support.models.tiny_models import SPECIFIC, build
from workers.model.loader import load

pytestmark = pytest.mark.usefixtures("one_thread")


def rewrite(folder: Path, rename: Any) -> Path:
    path = folder / "model.safetensors"
    save_file({rename(name): weight for name, weight in load_file(path).items()}, path, {"format": "pt"})
    return folder


def test_names_without_the_prefix_of_the_base_model(tmp_path: Path) -> None:
    folder = build("gpt2", tmp_path, vocab_size=VOCAB)
    check(rewrite(folder, lambda name: name.removeprefix("transformer.")), 2)


@pytest.mark.parametrize("family", ["gpt_neox", "mixtral"])
def test_checkpoints_that_name_weights_as_the_model_does(family: str, tmp_path: Path) -> None:
    """Newer ones may hold experts as one tensor, and the head under its newer name."""
    folder = build(family, tmp_path, vocab_size=VOCAB)
    weights = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    save_file(
        {name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    check(folder, 2)


def test_weights_in_several_files(tmp_path: Path) -> None:
    folder = build("qwen3_moe", tmp_path, vocab_size=VOCAB)
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder / "split", max_shard_size="50KB")
    assert len(list((folder / "split").glob("*.safetensors"))) > 2
    check(folder / "split", 2)


@pytest.mark.parametrize("family", ["gemma3_text", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_have_the_dtypes_that_one_rank_gives_them(family: str, dtype: str, tmp_path: Path) -> None:
    folder = build(family, tmp_path)
    whole = load(ModelConfig(model=str(folder), dtype=dtype)).model  # type: ignore[arg-type]
    for split in in_memory(2, lambda group: share(folder, group, dtype=dtype)):
        renamed = {
            name.replace("embed_tokens.rows.", "embed_tokens."): tensor
            for name, tensor in (*split.model.named_parameters(), *split.model.named_buffers())
        }
        expected = dict((*whole.named_parameters(), *whole.named_buffers()))
        assert {name: tensor.dtype for name, tensor in renamed.items()} == {
            name: tensor.dtype for name, tensor in expected.items()
        }
        assert not any(tensor.is_meta or tensor.requires_grad for tensor in renamed.values())
        assert not split.model.training


def refusal(folder: Path, ranks: int) -> str:
    with pytest.raises(ModelError) as caught:
        in_memory(ranks, lambda group: share(folder, group))
    return str(caught.value)


@pytest.mark.parametrize(
    ("family", "changes", "ranks", "message"),
    [
        ("llama", {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 48}, 4,
         "4 ranks cannot share 6 attention heads evenly"),
        ("llama", {"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 48}, 4,
         "4 ranks can neither share nor copy 3 key/value heads evenly"),
        ("llama", {"intermediate_size": 50}, 4,
         "4 ranks cannot share 50 columns in model.layers.0.mlp.gate_proj evenly"),
        ("gpt2", {}, 3, "3 ranks cannot share 4 attention heads evenly"),
        ("mixtral", {"intermediate_size": 49}, 2,
         "2 ranks cannot share 49 inner columns in model.layers.0.mlp.experts"),
        ("olmo2", {"hidden_size": 40, "num_key_value_heads": 1}, 4,
         "4 ranks cannot share 10 columns in model.layers.0.self_attn.k_proj evenly"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_refused_with_the_numbers(
    family: str, changes: dict[str, Any], ranks: int, message: str, tmp_path: Path
) -> None:
    assert message in refusal(build(family, tmp_path, **changes), ranks)


def test_families_without_a_plan_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SPECIFIC, "persimmon", {})
    message = refusal(build("persimmon", tmp_path), 2)
    assert "model_type 'persimmon' has no plan for tensor parallelism; use tensor_parallel_size=1" in message


def test_styles_that_are_unknown_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig

    plan = {**LlamaConfig.base_model_tp_plan, "layers.*.mlp.down_proj": "diagonal"}
    monkeypatch.setattr(LlamaConfig, "base_model_tp_plan", plan)
    message = refusal(build("llama", tmp_path), 2)
    assert "unknown tensor-parallel style 'diagonal' at layers.*.mlp.down_proj" in message


def test_code_that_counts_all_heads_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.model.tensor_parallel.LOCAL_NUMBERS", {})
    assert "its code does not run on a share of its heads, with 2 ranks" in refusal(build("opt", tmp_path), 2)


def test_weights_that_lack_or_do_not_fit(tmp_path: Path) -> None:
    folder = build("mixtral", tmp_path)
    path = folder / "model.safetensors"
    weights = load_file(path)
    lacking = {name: weight for name, weight in weights.items() if "layers.1.block_sparse_moe.experts.2.w3" not in name}
    save_file(lacking, path, {"format": "pt"})
    assert "1 weights are missing from the checkpoint, the first is model.layers.1.mlp.experts.gate_up_proj" in refusal(
        folder, 2
    )
    weights["model.norm.weight"] = torch.ones(31)
    save_file(weights, path, {"format": "pt"})
    assert "model.norm.weight should be [32], but the checkpoint has [31]" in refusal(folder, 2)
    path.write_bytes(path.read_bytes()[:400])
    assert "cannot be read" in refusal(folder, 2)


class Counted:
    """A file of weights that counts the numbers read from it."""

    def __init__(self, file: Any) -> None:
        self.file, self.read = file, 0

    def __enter__(self) -> "Counted":
        self.file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.file.__exit__(*error)

    def keys(self) -> Sequence[str]:
        return self.file.keys()  # type: ignore[no-any-return]

    def get_slice(self, name: str) -> "CountedSlice":
        return CountedSlice(self, self.file.get_slice(name))


class CountedSlice:
    def __init__(self, owner: Counted, piece: Any) -> None:
        self.owner, self.piece = owner, piece

    def get_shape(self) -> list[int]:
        return self.piece.get_shape()  # type: ignore[no-any-return]

    def __getitem__(self, index: Any) -> torch.Tensor:
        part: torch.Tensor = self.piece[index]
        self.owner.read += part.numel()
        return part


@pytest.mark.parametrize("family", ["llama", "mixtral", "phi3", "gpt_oss", "gpt2"])
def test_a_rank_reads_its_own_part_only(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors import safe_open

    opened: list[Counted] = []

    def count(*args: Any) -> Counted:
        opened.append(Counted(safe_open(*args)))
        return opened[-1]

    monkeypatch.setattr("workers.weights.files.safe_open", count)
    folder = build(family, tmp_path, vocab_size=VOCAB)
    stored = sum(weight.numel() for weight in load_file(folder / "model.safetensors").values())
    shares = in_memory(2, lambda group: share(folder, group))
    held = [sum(weight.numel() for weight in loaded.model.parameters()) for loaded in shares]
    assert all(file.read <= max(held) for file in opened)
    assert stored <= sum(file.read for file in opened) <= 1.3 * stored
