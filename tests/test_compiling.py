"""Compiled in warm-up, two models in one process still say what they say eager."""

import shutil
from pathlib import Path

import pytest

from slipstream import SamplingParams
from tests.identity import Reference, assert_identical, generate
from tests.tiny_models import build


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("c++") is None, reason="needs a C++ compiler")
def test_compiled_target_and_draft_do_not_share_a_graph(tmp_path: Path) -> None:
    # The same class with other sizes, which is what a draft usually is.
    target = build("llama", tmp_path / "target")
    draft = build("llama", tmp_path / "draft", hidden_size=64, intermediate_size=80)
    prompts = [[5, 9, 17, 4] * 5, [30, 31]]
    run = generate(
        target, prompts, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True), enforce_eager=False,
        speculative_config={"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2},
    )
    reference = Reference(target)
    assert_identical(prompts, run.outputs, [reference.greedy(prompt, 12) for prompt in prompts], reference)
    assert run.proposed > 0
