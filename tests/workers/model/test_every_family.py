"""Every decoder-only family that the installed `transformers` lists is served right, or refused with a reason."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from protos.config.engine import ModelConfig
from protos.errors import ModelError
from slipstream import SamplingParams
from tests.support.identity import Reference, assert_identical, generate
from tests.support.models.every_family import NotBuiltError, build_any
from workers.model.loader import load
from workers.model.self_check import self_check
from workers.weights.keeping import AsValues
from workers.weights.load import load_whole

pytestmark = pytest.mark.usefixtures("one_thread")

LEAST_SERVED = 95
PROMPTS = [[5, 9, 17, 5, 9, 17, 5, 9], [3, 1, 4, 1, 5]]
COUNT = 8
ROOM: dict[str, Any] = {"num_gpu_blocks_override": 32, "max_num_seqs": 2}
UNREADABLE = {"gemma3n_text"}
"""Their weights cannot be read one by one."""
LENGTH = 64
"""Of a sequence; some configurations state none."""


def _outcome(family: str, folder: Path) -> str:
    try:
        model = build_any(family, folder)
    except NotBuiltError:
        return "not built"
    try:
        loaded = load(ModelConfig(model=str(model), dtype="float32"))
        self_check(loaded, family)
    except ModelError as error:
        assert str(error).strip()
        return "refused"
    _check_tokens(model)
    if family not in UNREADABLE:
        _check_own_reader(model)
    return "served"


def _check_own_reader(model: Path) -> None:
    """Compare a model whose weights are read one by one, as where they are quantised or split, with `transformers`."""
    own = load_whole(model, "m", AutoConfig.from_pretrained(model), torch.float32, torch.device("cpu"), AsValues())
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    logits = []
    for each in (own, theirs):
        each.set_attn_implementation("eager")
        with torch.no_grad():
            logits.append(each(input_ids=torch.tensor(PROMPTS[:1]), use_cache=False).logits)
    torch.testing.assert_close(*logits, rtol=0.0, atol=1e-4)  # equal weights may have other strides


def _check_tokens(model: Path) -> None:
    """Compare the tokens without drafts, with n-grams and with the model as its own draft with `transformers`'."""
    reference = Reference(model)
    expected = [reference.greedy(prompt, COUNT) for prompt in PROMPTS]
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    for speculative in (None, {"method": "ngram"}, {"model": str(model)}):
        config = speculative and {**speculative, "num_speculative_tokens": 2}
        run = generate(model, PROMPTS, params, speculative_config=config, max_model_len=LENGTH, **ROOM)
        assert_identical(PROMPTS, run.outputs, expected, reference)


FEW = ["olmo", "exaone4", "deepseek_v2", "bert", "rwkv", "gemma4_text", "minimax_m2", "apertus", "hy_v3", "granitemoe"]


@pytest.mark.parametrize("family", FEW)
def test_some(family: str, tmp_path: Path) -> None:
    assert _outcome(family, tmp_path / "m") == ("refused" if family in {"bert", "rwkv"} else "served")


@pytest.mark.full
def test_all(tmp_path: Path) -> None:
    """Any other error than `ModelError` fails. The lists are printed."""
    families = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    outcomes = {family: _outcome(family, tmp_path / family) for family in families}
    for kind in ("served", "refused", "not built"):
        found = [family for family in families if outcomes[family] == kind]
        print(f"\n{len(found)} {kind}: {' '.join(found)}")
    assert list(outcomes.values()).count("served") >= LEAST_SERVED
