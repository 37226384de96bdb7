"""Speculation over 8-bit K and V: the same tokens as without it under the same `kv_cache_dtype`."""

from pathlib import Path
from typing import Any

import pytest

from slipstream import SamplingParams
from tests.exactness.test_identity import COUNT, NGRAM, mixed_prompts
from tests.support.identity import Run, generate, perturbed
from tests.support.models import synthetic_layers
from tests.support.models.tiny_models import build

QUANTIZED = ["int8", "fp8"]
ROOM: dict[str, Any] = {
    "max_num_batched_tokens": 16,
    "max_num_seqs": 6,
    "block_size": 4,
    "num_gpu_blocks_override": 40,
    "max_model_len": 128,
}
"""Prompts in chunks, shared prefixes, and so few blocks that sequences are preempted."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def methods(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("drafts")
    draft = {"method": "draft_model", "model": str(perturbed(target, folder / "draft")), "num_speculative_tokens": 3}
    head = synthetic_layers.eagle3(target, kept=12).write(folder / "head")
    return {
        "ngram": NGRAM,
        "draft_model": draft,
        "draft_model with another cache": {**draft, "kv_cache_dtype": "auto"},
        "eagle3 tree": {
            "method": "eagle3",
            "model": str(head),
            "num_speculative_tokens": 9,
            "draft_shape": "tree",
        },
        "self_window": {"method": "self_window", "draft_kv_window": 12, "num_speculative_tokens": 3},
    }


def run(target: Path, stored: str, speculative: dict[str, Any] | None, **options: Any) -> Run:
    prompts = mixed_prompts()
    params = [
        SamplingParams(temperature=0.8 * (i % 3 == 2), seed=i, max_tokens=COUNT, ignore_eos=True)
        for i in range(len(prompts))
    ]
    return generate(target, prompts, params, kv_cache_dtype=stored, speculative_config=speculative, **ROOM, **options)


@pytest.mark.parametrize("stored", QUANTIZED)
def test_identity_to_the_bit_with_batch_invariant(
    target: Path, methods: dict[str, dict[str, Any]], stored: str
) -> None:
    """What is stored of a token depends on nothing but its K and V, which do not depend on the batch here."""
    off = run(target, stored, None, batch_invariant=True)
    assert off.proposed == 0
    assert off.preemptions > 0
    alone = run(target, stored, None, batch_invariant=True, enable_prefix_caching=False)
    assert alone.outputs == off.outputs
    for name, speculative in methods.items():
        on = run(target, stored, speculative, batch_invariant=True)
        assert on.outputs == off.outputs, name
        on.assert_speculated()


@pytest.mark.parametrize("stored", QUANTIZED)
def test_identity_in_fp32(target: Path, methods: dict[str, dict[str, Any]], stored: str) -> None:
    off = run(target, stored, None)
    assert off.proposed == 0
    assert off.preemptions > 0
    for name, speculative in methods.items():
        on = run(target, stored, speculative)
        on.assert_speculated()
        differing = [i for i, (a, b) in enumerate(zip(off.outputs, on.outputs, strict=True)) if a != b]
        assert not differing, name


def test_rounding_changes_the_output(target: Path) -> None:
    """So the tests above compare what they mean to."""
    assert len({str(run(target, stored, None).outputs) for stored in ("auto", *QUANTIZED)}) > 1
