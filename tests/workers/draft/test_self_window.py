"""The target as its own draft: one set of weights, one KV cache, which it leaves as it finds it."""

import random
from pathlib import Path
from typing import Any

import pytest

from slipstream import SamplingParams
from tests.proposers.test_every_proposer import requests, started
from tests.support.distributed.engine import Engine
from tests.support.identity import CROWDED, Run, generate
from tests.support.models.tiny_models import build
from workers.draft.engine import DraftEngine
from workers.model.runner import ModelRunner
from workers.model.windowed_runner import WindowedRunner

WIDE = {"method": "self_window", "draft_kv_window": 160, "num_speculative_tokens": 3}
NARROW = {**WIDE, "draft_kv_window": 5, "draft_kv_sinks": 2}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("models") / "target", vocab_size=23)


def crowded(target: Path, speculative: dict[str, Any] | None) -> Run:
    """Shared prefixes, chunked prompts, preemption, and contexts that end at the borders of blocks."""
    rng = random.Random(1)
    shared = [rng.randrange(3, 23) for _ in range(20)]
    prompts = [shared, *(shared + [rng.randrange(3, 23) for _ in range(5 * i)] for i in range(6))]
    params = [
        SamplingParams(temperature=0.9 * (i % 3 == 2), seed=i, max_tokens=10 + 9 * i, ignore_eos=True) for i in range(7)
    ]
    return generate(
        target,
        prompts * 2,
        params * 2,
        **CROWDED,
        speculative_config=speculative,
    )


@pytest.mark.parametrize("table", [None, [[1, 3, 3], [4, 99, 0]]], ids=["always on", "on and off by batch size"])
def test_within_the_window_it_is_never_wrong(target: Path, table: list[list[int]] | None) -> None:
    """A place that the target had not computed, or that a draft had overwritten, would show as a rejection."""
    plain = crowded(target, None)
    run = crowded(target, WIDE | ({"num_speculative_tokens_per_batch_size": table} if table else {}))
    assert run.outputs == plain.outputs
    assert run.preemptions > 0
    assert run.accepted == run.proposed > 50


@pytest.mark.parametrize(
    "options",
    [{}, {"draft_shape": "tree", "num_speculative_tokens": 9}, {"rejection_sample_method": "block"}],
    ids=["chain", "tree", "block"],
)
def test_beyond_the_window_it_changes_no_greedy_token(target: Path, options: dict[str, Any]) -> None:
    plain, run = crowded(target, None), crowded(target, NARROW | options)
    run.assert_speculated()
    for i, (wanted, found) in enumerate(zip(plain.outputs, run.outputs, strict=True)):
        if i % 7 % 3 < 2 or "rejection_sample_method" not in options:
            assert found == wanted, i


def test_nothing_is_held_twice(target: Path, running: list[Engine]) -> None:
    """Neither weights nor caches: as many KV blocks fit as without a draft."""
    memory = {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 1 << 18}
    plain, own = (started(target, options, **memory) for options in (None, NARROW))
    running += [plain, own]
    assert own.built.info.num_blocks == plain.built.info.num_blocks
    draft, runner = own.built.executor.rank.source, own.built.executor.rank.worker.runner  # type: ignore[attr-defined]
    assert isinstance(draft, DraftEngine) and isinstance(draft.worker.forward, WindowedRunner)
    assert draft.worker.module is runner.module
    assert draft.worker.forward._attention.cache is runner.cache  # type: ignore[attr-defined]


def test_another_dtype_is_another_model(target: Path, running: list[Engine]) -> None:
    own = started(target, {**WIDE, "dtype": "bfloat16"})
    running.append(own)
    forward = own.built.executor.rank.source.worker.forward  # type: ignore[attr-defined]
    assert isinstance(forward, ModelRunner)
    own.put(*requests()[:4])
    plain = started(target, None)
    running.append(plain)
    plain.put(*requests()[:4])
    assert own.finish() == plain.finish()
    assert own.proposed() > own.accepted > 0


def test_after_a_model_free_method(target: Path) -> None:
    run = crowded(target, {**NARROW, "method": ["ngram", "self_window"], "prompt_lookup_min": 2})
    assert run.outputs == crowded(target, None).outputs
    run.assert_speculated()
