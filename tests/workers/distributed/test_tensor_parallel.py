"""Models split over ranks, against the plain `transformers` forward."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from protos.config.engine import ModelConfig
from protos.errors import ModelError
from protos.layers import LayerShape
from tests.support.distributed.ranks import in_memory, on_ranks
from tests.support.models.tiny_models import FAMILIES, SPECIFIC, build
from tests.workers.model.test_models import BLOCK, PREFIX, SLOTS, fill, paged_logits, reference_logits, sequences
from workers.attention.batch import Batch
from workers.distributed.groups import Group
from workers.model.loaded import LoadedModel
from workers.model.loader import load
from workers.model.runner import ModelRunner
from workers.slots import SlotTable

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB = 97  # neither 2 nor 4 divide it
TOLERANCE = 2e-5  # largest error of a logit, in fp32, relative to the largest logit; the same as for one rank
BLOCKS = 40
GATHERED = frozenset({"olmo2", "olmoe", "phi3"})
"""Families whose attention sees all heads on every rank."""


def share(folder: Path, group: Group, **options: Any) -> LoadedModel:
    return load(ModelConfig(model=str(folder), device="cpu", **options), group)


def runner_of(folder: Path, group: Group, rows: list[np.ndarray]) -> ModelRunner:
    slots = SlotTable(SLOTS, 64, BLOCK)
    fill(slots, rows, BLOCKS)
    return ModelRunner(share(folder, group), slots, BLOCKS, BLOCK)


def check(folder: Path, ranks: int, vocab: int = VOCAB) -> list[tuple[LayerShape, ...]]:
    """Hold the logits of *ranks* ranks, fed in chunks, to the unsplit model's; return each rank's cache shapes."""
    rows = sequences(vocab)
    expected = reference_logits(folder, rows, "eager")

    def work(group: Group) -> tuple[list[torch.Tensor], tuple[LayerShape, ...]]:
        runner = runner_of(folder, group, rows)
        assert (runner.loaded.vocab_size, runner.loaded.ranks) == (vocab, ranks)
        return paged_logits(runner, rows), runner.loaded.layers

    (found, _), *others = results = in_memory(ranks, work)
    for slot, (mine, reference) in enumerate(zip(found, expected, strict=True)):
        wanted = reference[PREFIX:] if slot == 2 else reference
        assert torch.isfinite(mine).all()
        assert (mine - wanted).abs().max() <= TOLERANCE * max(1.0, wanted.abs().max().item()), slot
    assert all(logits.shape[1] == 0 for parts, _ in others for logits in parts), "only rank 0 gets logits"
    return [layers for _, layers in results]


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_equal_one(family: str, tmp_path: Path) -> None:
    folder = build(family, tmp_path, vocab_size=VOCAB)
    whole = load(ModelConfig(model=str(folder))).layers[0].kv_heads
    here = whole if family in GATHERED or whole == 1 else whole // 2
    assert [layers[0].kv_heads for layers in check(folder, 2)] == [here, here]


@pytest.mark.parametrize("family", FAMILIES)
def test_four_ranks_equal_one(family: str, tmp_path: Path) -> None:
    """With two K/V heads in most families: each is on two ranks."""
    folder = build(family, tmp_path, vocab_size=VOCAB)
    whole = load(ModelConfig(model=str(folder))).layers[0].kv_heads
    here = whole if family in GATHERED else max(1, whole // 4)
    assert [layers[0].kv_heads for layers in check(folder, 4)] == [here] * 4


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
        ("llama", {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 48, "ranks": 3}),
        ("gemma2", {"tie_word_embeddings": True}),
        ("stablelm", {"qk_layernorm": True, "use_qkv_bias": True}),
        ("stablelm", {"qk_layernorm": True, "ranks": 4}),
        ("opt", {"word_embed_proj_dim": 16, "tie_word_embeddings": True}),
        ("opt", {"do_layer_norm_before": False}),
        ("gpt2", {"tie_word_embeddings": True}),
        ("gpt_bigcode", {"multi_query": False}),
        ("gpt_bigcode", {"multi_query": False, "ranks": 4}),
        ("deepseek_v3", {"q_lora_rank": None}),
        ("deepseek_v3", {"rope_interleave": False, "ranks": 4}),
        ("olmoe", {"clip_qkv": 0.5}),
        ("phi", {"qk_layernorm": True}),
        ("llama", {"vocab_size": 9, "ranks": 4}),
    ],
)
def test_variants(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    changes = {"vocab_size": VOCAB, **changes}
    ranks = changes.pop("ranks", 2)
    check(build(family, tmp_path, **changes), ranks, changes["vocab_size"])


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


def decode(runner: ModelRunner, group: Group, prompt: np.ndarray, steps: int) -> list[int]:
    """Greedy ids, chosen by rank 0 and told to the others."""
    ids = list(prompt)
    start = 0
    for _ in range(steps):
        fed = np.array(ids[start:])
        batch = Batch(np.array([0]), np.array([start]), np.array([len(fed)]), fed)
        logits_1V = runner.forward(batch, np.array([len(fed) - 1]))
        chosen = logits_1V.argmax(-1) if group.rank == 0 else torch.zeros(1, dtype=torch.int64)
        start = len(ids)
        ids.append(int(group.broadcast(chosen)))
    return ids[len(prompt) :]


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_greedy_ids_over_gloo(family: str, tmp_path: Path) -> None:
    folder = build(family, tmp_path, vocab_size=VOCAB)
    rows = sequences(VOCAB)[3:]
    rows[0] = np.concatenate((rows[0], np.zeros(20, np.int64)))  # whose blocks the new tokens take
    prompt = rows[0][:9]
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    settings = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False, "eos_token_id": VOCAB + 1}
    expected = model.generate(torch.from_numpy(prompt)[None], **settings)[0, 9:].tolist()
    found = on_ranks(2, lambda group: decode(runner_of(folder, group, rows), group, prompt, 20))
    assert found == [expected, expected]


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

    monkeypatch.setattr("workers.weights.reader.safe_open", count)
    folder = build(family, tmp_path, vocab_size=VOCAB)
    stored = sum(weight.numel() for weight in load_file(folder / "model.safetensors").values())
    shares = in_memory(2, lambda group: share(folder, group))
    held = [sum(weight.numel() for weight in loaded.model.parameters()) for loaded in shares]
    assert all(file.read <= max(held) for file in opened)
    assert stored <= sum(file.read for file in opened) <= 1.3 * stored


def test_notes_tell_what_this_rank_caches(tmp_path: Path) -> None:
    folder = build("llama", tmp_path)
    assert [loaded.notes for loaded in in_memory(2, lambda group: share(folder, group))] == [
        ("KV cache: 192 bytes per token",)
    ] * 2


def test_split_models_say_that_they_run_eager(tmp_path: Path) -> None:
    folder = build("llama", tmp_path)
    lines = in_memory(2, lambda group: runner_of(folder, group, sequences()).warm_up())
    assert lines == ["running eager: exchanges between ranks are not compiled"] * 2


def test_a_config_that_lies_about_its_heads(tmp_path: Path) -> None:
    folder = build("opt", tmp_path, vocab_size=VOCAB)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_key_value_heads": 1}))
    check(folder, 4)
