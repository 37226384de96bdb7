"""Greedy fp32: the same tokens from transformers, without speculation, with n-grams and with a draft, for every family.

A mixed batch: 16-token prefill chunks, shared prefixes, and so few blocks that sequences are preempted.
"""

import random
from pathlib import Path

import pytest

from slipstream import SamplingParams
from tests.support.identity import Reference, Run, assert_identical, generate, perturbed
from tests.support.models.tiny_models import FAMILIES, build

VOCAB = 128
COUNT = 24
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def mixed_prompts() -> list[list[int]]:
    rng = random.Random(5)
    shared = [rng.randrange(3, 90) for _ in range(20)]
    lengths = (1, 7, 33, 40, 12, 26)
    prompts = [[rng.randrange(3, 90) for _ in range(length)] for length in lengths]
    return [*prompts, *(shared + prompt[:5] for prompt in prompts[1:4]), shared + shared]


def run(model: Path, speculative: dict[str, object] | None) -> Run:
    return generate(
        model,
        mixed_prompts(),
        SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True),
        max_num_batched_tokens=16,
        max_num_seqs=6,
        block_size=4,
        num_gpu_blocks_override=40,
        max_model_len=128,
        speculative_config=speculative,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers_with_and_without_speculation(family: str, tmp_path: Path) -> None:
    model = build(family, tmp_path / "target")
    draft = perturbed(model, tmp_path / "draft")
    reference = Reference(model)
    wanted = [reference.greedy(prompt, COUNT) for prompt in mixed_prompts()]
    off = run(model, None)
    assert off.proposed == 0
    assert off.preemptions > 0
    assert_identical(mixed_prompts(), off.outputs, wanted, reference)
    drafted = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    for speculative in (NGRAM, drafted):
        on = run(model, speculative)
        assert_identical(mixed_prompts(), on.outputs, wanted, reference)
        on.assert_speculated()
