"""Checkpoints that the libraries of their formats made: the logits that these libraries' own reading gives."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from protos.config.engine import ModelConfig
from protos.errors import ModelError
from slipstream import SamplingParams
from tests.support.checkpoints import auto_round, publishers
from tests.support.checkpoints.auto_round import LOGITS, MADE, SIZES
from tests.support.distributed.ranks import in_memory
from tests.support.identity import generate
from tests.support.models import synthetic_layers
from tests.support.models.quantized_layers import values_of
from tests.support.models.tiny_models import build
from tests.support.recurrent.rows import feed, runner_of
from workers.distributed.groups import Group
from workers.model.loader import load

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-5
"""Of a logit in fp32, relative to the largest."""
PROMPTS = [[5, 9, 17, 5, 9, 17, 5, 9], [3, 1, 4, 1, 5, 9, 2, 6, 5], [40, 41, 42]]
FOLDERS = {name: source.MADE / name for source in (auto_round, publishers) for name in source.FORMATS}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", FOLDERS)
def test_logits_are_the_librarys(name: str, ranks: int) -> None:
    wanted = load_file(FOLDERS[name] / LOGITS)
    row = wanted["ids"][0].numpy()

    def work(group: Group) -> torch.Tensor:
        return feed(runner_of(FOLDERS[name], [row], group), [0], [0], [len(row)])[0]

    found, *_ = in_memory(ranks, work)
    assert (found - wanted["logits"][0]).abs().max() <= TOLERANCE * wanted["logits"].abs().max()


@pytest.mark.parametrize("name", FOLDERS)
def test_drafts_change_no_token(name: str, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    head = synthetic_layers.eagle3(build("llama", tmp_path / "source", **SIZES), kept=12).write(tmp_path / "head")
    methods: tuple[dict[str, Any], ...] = (
        {"method": "ngram"},
        {"model": str(MADE / "own_gptq")},
        {"method": "eagle3", "model": str(head)},
    )
    off = generate(FOLDERS[name], PROMPTS, params)
    for speculative in methods:
        run = generate(FOLDERS[name], PROMPTS, params, speculative_config={**speculative, "num_speculative_tokens": 3})
        assert run.proposed > 0
        assert run.outputs == off.outputs, speculative


def test_scales_as_exponents_in_bytes_are_the_same(tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDERS["fp8_blocks_ue8m0"], tmp_path, dirs_exist_ok=True)
    stored = load_file(folder / "model.safetensors")
    scales = {name: scale.view(torch.uint8) for name, scale in stored.items() if name.endswith("_scale_inv")}
    assert len(scales) == 21
    save_file(stored | scales, folder / "model.safetensors", {"format": "pt"})
    found, wanted = (
        values_of(load(ModelConfig(model=str(one))).model) for one in (folder, FOLDERS["fp8_blocks_ue8m0"])
    )
    assert found.keys() == wanted.keys() and all(found[name].equal(wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("fp8_blocks", "21 of 22 linear layers"),
        ("fp8_blocks_ue8m0", "21 of 22 linear layers"),
        ("fbgemm", "21 of 22 linear layers"),
        ("model_opt", "21 of 22 linear layers"),
        ("gpt_oss", "the experts of 3 of 3 layers"),
    ],
)
def test_weights_stay_quantised_in_memory(name: str, kept: str) -> None:
    notes = load(ModelConfig(model=str(FOLDERS[name]))).notes
    assert any(f"{kept} stay so" in note for note in notes), notes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"packing_format": "auto_round:fake"}, "packing_format 'auto_round:fake' is not supported"),
        ({"extra_config": {"model.layers.0.mlp.up_proj": {"bits": 8}}}, r"'model.layers.0.mlp.up_proj'\] has .*8"),
        ({"bits": 3}, "bits is 3, but only 2, 4 and 8"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = changed(tmp_path, changes)
    with pytest.raises(ModelError, match=reason):
        load(ModelConfig(model=str(folder)))


def test_layers_that_are_not_quantised_are_no_obstacle(tmp_path: Path) -> None:
    load(ModelConfig(model=str(changed(tmp_path, {"extra_config": {"lm_head": {"bits": 16, "group_size": 128}}}))))


def changed(folder: Path, changes: dict[str, Any]) -> Path:
    """Copy a checkpoint, and change its `quantization_config`."""
    shutil.copytree(MADE / "own_gptq", folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder
