"""Which method a checkpoint is for: by its config, its tensors or its name; contradicting arguments are refused."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import NotASafetensorsRepoError
from safetensors.torch import load_file, save_file

from proposers.formats import detect
from proposers.formats.shared import peek
from protos.config.method import Described
from protos.errors import ConfigError, ModelError
from tests.support.checkpoint_arguments import parse, speculative
from tests.support.models import synthetic, synthetic_layers, tiny_models, wrapped
from tests.support.models.synthetic import Synthetic

ROOT = Path(__file__).parents[3]
Write = Callable[..., Synthetic]
WRITERS: dict[str, Write] = {
    "medusa": synthetic.medusa,
    "medusa v2": lambda target: synthetic.medusa(target, own_heads=False),
    "medusa vllm": synthetic.medusa_vllm,
    "hydra": synthetic.hydra,
    "hydra prefix": lambda target: synthetic.hydra(target, prefix=True),
    "mlp_speculator": synthetic.mlp_speculator,
    "recurrent": synthetic.recurrent,
    "recurrent with input": lambda target: synthetic.recurrent(target, exit_dim=24),
    "eagle": synthetic_layers.eagle,
    "eagle vllm": synthetic_layers.eagle_vllm,
    "eagle3": synthetic_layers.eagle3,
    "p_eagle": synthetic_layers.p_eagle,
    "dflash": synthetic_layers.dflash,
    "speculators eagle3": lambda target: synthetic_layers.speculators(synthetic_layers.eagle3(target), target),
    "speculators p_eagle": lambda target: synthetic_layers.speculators(synthetic_layers.p_eagle(target), target),
    "speculators dflash": lambda target: synthetic_layers.speculators(synthetic_layers.dflash(target), target),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("llama", tmp_path_factory.mktemp("models") / "base")


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_is_recognised(target: Path, tmp_path: Path, name: str) -> None:
    made = WRITERS[name](target)
    assert detect.describe(str(made.write(tmp_path / "draft"))).method == made.method


@pytest.mark.parametrize("name", [name for name in WRITERS if not name.startswith(("speculators", "eagle vllm"))])
def test_tensors_tell_where_the_config_does_not(target: Path, tmp_path: Path, name: str) -> None:
    made = WRITERS[name](target)
    for place, config in (("silent", {}), ("plain", synthetic_layers.llama_config(target, num_hidden_layers=32))):
        folder = Synthetic(config, made.tensors, made.file).write(tmp_path / place)
        assert detect.describe(str(folder)).method == made.method


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gpt_neox", "deepseek_v3"])
def test_whole_models_are_no_heads(tmp_path: Path, family: str) -> None:
    """A config that promises heads for multi-token prediction does not make them be there."""
    folder = tiny_models.build(family, tmp_path / "draft", num_nextn_predict_layers=1)
    assert detect.describe(str(folder)).method == "draft_model"


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "qwen2"])
def test_heads_within_a_target_are_found(tmp_path: Path, family: str) -> None:
    folder = synthetic_layers.with_mtp(family, tmp_path / "base", heads=2)
    assert detect.describe(str(folder))[:3] == ("mtp", 2, "the number of heads")
    config = parse(model=str(folder), speculative_config={"method": f"{family}_mtp"}).speculative
    assert config is not None
    assert (config.method, config.model, config.num_speculative_tokens) == ("mtp", None, 2)


@pytest.mark.parametrize(
    ("name", "config", "method"),
    [
        ("some/EAGLE3-LLaMA3.1", None, "eagle3"),
        ("some/EAGLE-LLaMA3", None, "eagle"),
        ("ibm-ai-platform/llama3-8b-accelerator", None, "mlp_speculator"),
        ("me/accelerator", None, None),
        ("EAGLE/plain", None, None),
        ("draft", '{"model_type": "medusa"}', "medusa"),
        ("draft", '{"architectures": ["LlamaForCausalLMEagle3"]}', "eagle3"),
        ("draft", '{"architectures": ["LlamaForCausalLM"], "pard_token": 9, "num_hidden_layers": 3}', "pard"),
        ("draft", '{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}', None),
        ("draft", "[", None),
    ],
)
def test_what_has_no_weights_is_judged_by_what_there_is(
    tmp_path: Path, name: str, config: str | None, method: str | None
) -> None:
    if config is not None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
        name = str(tmp_path / name)
    assert detect.describe(name).method == method


def test_heads_within_a_multimodal_target_are_found_and_another_whole_model_is_a_draft(tmp_path: Path) -> None:
    target = wrapped.build("qwen3_5", tmp_path / "target", mtp_num_hidden_layers=1)
    tensors = load_file(target / "model.safetensors")
    last = "model.language_model.layers.1."
    heads = {name.replace(last, "mtp.layers.0."): tensors[name].clone() for name in tensors if name.startswith(last)}
    heads["mtp.fc.weight"] = torch.ones(32, 64)
    save_file({**tensors, **heads}, target / "model.safetensors", {"format": "pt"})
    assert detect.describe(str(target))[:3] == ("mtp", 1, "the number of heads")
    for keys, method, model in (
        ({"method": "mtp"}, "mtp", None),
        ({"model": str(target)}, "mtp", None),
        ({"model": str(target), "method": "draft_model"}, "draft_model", str(target)),
    ):
        found = parse(model=str(target), speculative_config=keys).speculative
        assert found is not None
        assert (found.method, found.model) == (method, model)
    other = tiny_models.build("llama", tmp_path / "other")
    beside = parse(model=str(other), speculative_config={"model": str(target), "num_speculative_tokens": 2}).speculative
    assert beside is not None
    assert beside.method == "draft_model"


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["DSparkDraftModel"]},
        {"speculators_model_type": "dflash2"},
        {"model_type": "gemma4_assistant"},
    ],
)
def test_kinds_that_are_not_available_are_refused_by_name(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="not supported"):
        detect.describe(str(tmp_path))


def test_nothing_in_a_checkpoint_is_run_by_looking(tmp_path: Path) -> None:
    """A pickle that would create a file if it were loaded."""
    import pickle
    import zipfile

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "sprung",)

    with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"midlayer.hidden_norm.weight": Trap()}))
    assert detect.describe(str(tmp_path)).method == "eagle3"
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("place", ["folder", "Hub"])
def test_the_index_of_what_torch_saved_names_its_tensors(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"midlayer.hidden_norm.weight": "pytorch_model-00001-of-00002.bin"}}))
    if place == "folder":
        assert detect.describe(str(tmp_path)).method == "eagle3"
        return

    def download(_model: str, name: str, **_options: Any) -> str:
        if name != index.name:
            raise OSError(f"404: {name}")
        return str(index)

    def no_safetensors(name: str, **_options: Any) -> Any:
        raise NotASafetensorsRepoError(name)

    monkeypatch.setattr(peek, "unreachable", lambda: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", no_safetensors)
    assert detect.describe("some/draft").method == "eagle3"


def test_damaged_files_are_unknown_not_errors(tmp_path: Path) -> None:
    for name in ("model.safetensors", "model.safetensors.index.json", "config.json", "heads.pt"):
        (tmp_path / name).write_bytes(b"\xff" * 20)
        assert detect.describe(str(tmp_path)) == Described()


def test_looking_loads_neither_torch_nor_transformers(target: Path) -> None:
    code = f"""
import sys
from proposers.formats import detect
assert detect.describe({str(target)!r}).method == "draft_model"
assert detect.describe("no/such-model").method is None
assert not {{"torch", "transformers"}} & set(sys.modules)
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("medusa", 4), ("hydra", 3), ("mlp_speculator", 3), ("dflash", 3), ("eagle", 5), ("speculators eagle3", 3)],
)
def test_the_checkpoint_tells_how_many_tokens(target: Path, tmp_path: Path, name: str, tokens: int) -> None:
    folder = str(WRITERS[name](target).write(tmp_path / "draft"))
    assert speculative(model=folder).num_speculative_tokens == tokens
    assert speculative(model=folder, num_speculative_tokens=7).num_speculative_tokens == 7


def test_a_contradicting_method_is_told_the_right_one(target: Path, tmp_path: Path) -> None:
    folder = str(synthetic.medusa(target).write(tmp_path / "draft"))
    for method in ("eagle", "draft_model", ["ngram", "hydra"]):
        with pytest.raises(ConfigError, match=f"contradicts the checkpoint {folder}, which is for 'medusa'"):
            speculative(model=folder, method=method)
    assert speculative(model=folder, method=["ngram", "medusa"]).method == ("ngram", "medusa")
    with pytest.raises(ConfigError, match=r"method 'eagle' contradicts .* which is for 'draft_model'"):
        speculative(model=str(target), method="eagle")


@pytest.mark.parametrize(
    ("detected", "keys", "method"),
    [
        ("eagle3", {"parallel_drafting": "true"}, "p_eagle"),
        ("p_eagle", {"method": "eagle3"}, "p_eagle"),
        ("p_eagle", {"method": "eagle3", "parallel_drafting": "True"}, "p_eagle"),
        ("p_eagle", {"method": "eagle3", "parallel_drafting": "False"}, "eagle3"),
        (None, {"method": "eagle3", "parallel_drafting": True}, "p_eagle"),
        ("pard", {"method": "draft_model"}, "draft_model"),
        ("pard", {"method": "draft_model", "parallel_drafting": True}, "pard"),
        ("pard", {}, "pard"),
        ("dflash", {"parallel_drafting": True}, "dflash"),
        ("medusa", {"parallel_drafting": True}, "ConfigError"),
        ("mtp", {"method": "draft_model"}, "draft_model"),
        ("mtp", {"method": "glm4_moe_lite_mtp"}, "mtp"),
    ],
)
def test_parallel_drafting_and_other_uses(detected: str | None, keys: dict[str, Any], method: str) -> None:
    found = Described(detected, 2 if detected == "mtp" else None)
    if method == "ConfigError":
        with pytest.raises(ConfigError, match=r"parallel_drafting|contradicts"):
            speculative(found, model="d", **keys)
    else:
        config = speculative(found, model="d", **keys)
        assert config.method == method
        assert config.num_speculative_tokens == (2 if method == "mtp" else 5)


def test_heads_that_the_target_does_not_have(target: Path) -> None:
    with pytest.raises(ConfigError, match="needs heads in the target's own checkpoint"):
        parse(model=str(target), speculative_config={"method": "mtp"})


def test_the_targets_own_heads_may_be_named_by_the_target() -> None:
    config = parse(
        Described("mtp", 1),
        model="t",
        speculative_config={"method": "mtp", "model": "t"},
        distributed_executor_backend="ray",
    ).speculative
    assert config is not None
    assert (config.model, config.num_speculative_tokens, config.placement) == (None, 1, "dedicated")


def test_a_draft_that_names_its_target_is_served_with_it(target: Path, tmp_path: Path) -> None:
    draft = synthetic_layers.speculators(synthetic_layers.eagle3(target), target, tokens=4).write(tmp_path / "draft")
    config = parse(model=str(draft))
    assert (config.model.model, config.served_model_name) == (str(target), (str(draft),))
    assert config.speculative is not None
    assert (config.speculative.method, config.speculative.model) == ("eagle3", str(draft))
    assert config.speculative.num_speculative_tokens == 4
    fewer = parse(model=str(draft), speculative_config={"num_speculative_tokens": 2}).speculative
    assert fewer is not None
    assert (fewer.model, fewer.num_speculative_tokens) == (str(draft), 2)
    assert parse(model=str(draft), speculative_config={}).speculative is None
    ngram = parse(model=str(draft), speculative_config={"method": "ngram", "model": None}).speculative
    assert ngram is not None
    assert ngram.model is None
