"""Every policy, which chooses draft tokens row by row and step by step: the same tokens as without speculation."""

from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from tests.exactness.test_identity import COUNT, NGRAM, mixed_prompts
from tests.support.identity import CROWDED, Reference, Run, assert_identical, collect, generate, perturbed
from tests.support.models.tiny_models import build

POLICIES: dict[str, dict[str, Any]] = {
    "adaptive": {"policy": "adaptive"},
    "bandit": {"policy": "bandit"},
    "threshold": {"policy": "threshold", "disable_by_batch_size": 4},
    "schedule": {"num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 3, 2], [4, 5, 0]]},
    "fixed": {"policy": "fixed"},
}
PARAMS = [
    SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=COUNT + 2 * i, ignore_eos=True)
    for i in range(len(mixed_prompts()))
]
"""Every other request is sampled. Answers differ in length, and batches in size."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = perturbed(target, tmp_path_factory.mktemp("drafts") / "draft")
    return {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def plain(target: Path) -> Run:
    return generate(target, mixed_prompts(), PARAMS, **CROWDED)


def run(target: Path, speculative: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Run, set[int]]:
    """Return what an engine generates, and the numbers of draft tokens that rows were asked for."""
    asked = set[int]()
    with LLM(
        str(target),
        speculative_config=speculative,
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        **CROWDED,
    ) as llm:
        executor = llm._engine.assembled.executor  # type: ignore[attr-defined]
        run_plan = executor.run

        def note(plan: Any) -> Any:
            asked.update(row.k for row in plan.rows if row.samples)
            return run_plan(plan)

        monkeypatch.setattr(executor, "run", note)
        return collect(llm, mixed_prompts(), PARAMS), asked


@pytest.mark.parametrize("policy", POLICIES)
def test_identity(
    policy: str, target: Path, draft: dict[str, Any], plain: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert plain.preemptions > 0
    for speculative in (draft, NGRAM, {**draft, "assistant_confidence_threshold": 0.3}):
        on, asked = run(target, {**speculative, **POLICIES[policy]}, monkeypatch)
        assert_identical(mixed_prompts(), on.outputs, plain.outputs, Reference(target))
        on.assert_speculated()
        assert len(asked) > 1  # K changes
