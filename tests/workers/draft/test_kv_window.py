"""Drafts that read a window of their KV cache: bounded reading, and the target's tokens as without speculation."""

from pathlib import Path
from typing import Any

import pytest

from slipstream import SamplingParams
from tests.proposers.test_every_proposer import CASES, Folders, requests, started
from tests.proposers.test_every_proposer import folders as folders  # noqa: PLC0414 - a fixture
from tests.support.distributed.engine import Engine
from tests.support.identity import Run, generate
from tests.support.models.tiny_models import build, perturb
from workers.attention import native
from workers.attention.batch import AttentionMetadata
from workers.attention.torch import TorchAttention

WITH_KV = [case for case in CASES if case.method in {"draft_model", "eagle", "eagle3", "mtp", "p_eagle", "pard"}]
SHAPED = [pytest.param(case, shape, id=f"{case.name}-{shape}") for case in WITH_KV for shape in case.shapes]
WINDOW = {"draft_kv_window": 6, "draft_kv_sinks": 2}
PROMPTS = [[5 + (i * i + j) % 90 for i in range(60 + 45 * j)] for j in range(4)]
PARAMS = [
    SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=20, ignore_eos=True) for i in range(len(PROMPTS))
]
BLOCK = 8


@pytest.mark.parametrize(("case", "shape"), SHAPED)
def test_every_method_with_a_kv_cache_has_windows(
    case: Any, shape: str, folders: Folders, running: list[Engine], caplog: pytest.LogCaptureFixture
) -> None:
    engine = started(folders.of(case), folders.speculative(case, **case.shapes[shape], **WINDOW))
    running.append(engine)
    engine.put(*requests())
    assert engine.finish() == folders.plain(folders.of(case))
    assert engine.proposed() > engine.accepted > 0
    assert "the draft failed" not in caplog.text


def run(target: Path, draft: Path | None, **options: Any) -> Run:
    speculative = None if draft is None else {"model": str(draft), "num_speculative_tokens": 3, **options}
    return generate(
        target,
        PROMPTS,
        PARAMS,
        max_model_len=256,
        block_size=BLOCK,
        num_gpu_blocks_override=160,
        max_num_batched_tokens=64,
        speculative_config=speculative,
    )


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    target = build("llama", folder / "target")
    return target, perturb(target, folder / "draft")


@pytest.mark.parametrize("backend", ["kernel", "torch"])
def test_a_draft_step_reads_the_same_number_of_blocks_at_every_context(
    backend: str, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All K and V that a step of the draft is handed, by what `TorchAttention` gathers."""
    gathered: list[tuple[int, int]] = []  # rows, blocks
    plan = TorchAttention.plan

    def counting(self: TorchAttention, metadata: AttentionMetadata) -> None:
        plan(self, metadata)
        if metadata.kv_window is not None and metadata.lengths_R.max() == 1:
            gathered.append((len(metadata.starts_R), sum(len(group.blocks_N) for group in self._groups)))

    monkeypatch.setattr(TorchAttention, "plan", counting)
    if backend == "torch":
        monkeypatch.setattr(native, "NativeAttention", TorchAttention)
    plain = run(pair[0], None)
    found = run(*pair, draft_kv_window=16, draft_kv_sinks=4)
    assert found.outputs == plain.outputs
    found.assert_speculated()
    if backend == "torch":
        assert {rows for rows, _ in gathered} >= {1, 4}
        assert all(blocks <= rows * (1 + 3) for rows, blocks in gathered)  # one block of sinks, 16 places over three


def test_drafts_within_the_window_are_those_without_one(pair: tuple[Path, Path]) -> None:
    assert run(*pair, draft_kv_window=250) == run(*pair)


def test_a_small_window_changes_drafts_and_no_token(pair: tuple[Path, Path]) -> None:
    small, full = run(*pair, draft_kv_window=1, draft_kv_sinks=0), run(*pair)
    assert small.outputs == full.outputs
    assert small.accepted < full.accepted
