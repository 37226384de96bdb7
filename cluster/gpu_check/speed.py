"""The speed of decoding: plain and speculative, by batch, and as a share of what the memory's bandwidth allows."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.gpu_check.answers import COMMON, params, prompts
from cluster.gpu_check.bandwidth import read_bytes
from cluster.gpu_check.decoding import LONG, PLAIN, PROMPT, SHORT, DecodingSpeed
from cluster.gpu_check.models import SHAPES, right_share, save_pair
from cluster.llm import LLM
from protos.progress import ProgressCallback
from protos.stats import EngineStats

BLOCK = 16
FEW_ROWS = 8
"""At smaller batches so many prompts are measured, one batch after another."""


@dataclass(frozen=True)
class SpeedModels:
    """What is measured.

    Attributes:
        target, draft: shapes, see `models.SHAPES`; without a draft only plain decoding is.
        accepted: the share of draft tokens that are accepted.
        k: draft tokens of a round.
    """

    target: str
    draft: str | None = None
    accepted: float = 0.8
    k: int = 5


def rows(
    models: SpeedModels, device: str, batches: list[int], *, bytes_per_s: float, folder: Path, report: ProgressCallback
) -> Iterator[DecodingSpeed]:
    """Measure *models*; yield a row for each engine and batch size."""
    report(f"writing {models.target} and {models.draft or 'no draft'} with random weights")
    right = right_share(models.accepted, models.k)
    target, draft = save_pair(models.target, models.draft, right, device, folder)
    vocab = SHAPES[models.target].values["vocab_size"]
    given: dict[str, Any] = {
        "model": str(target),
        "device": device,
        "max_num_seqs": max(batches),
        "enable_prefix_caching": False,
    }
    given |= {**COMMON, "num_gpu_blocks_override": max(batches) * -(-(PROMPT + LONG + 64) // BLOCK)}
    sides: dict[str, dict[str, Any] | None] = {PLAIN: None}
    if models.draft is not None:
        speculative = {"model": str(draft), "num_speculative_tokens": models.k, "policy": "fixed"}
        sides[f"draft {models.draft}, K = {models.k}"] = {**speculative, "placement": "colocated"}
    plain: dict[int, float] = {}
    for method, speculative_config in sides.items():
        with LLM(speculative_config=speculative_config, **given) as llm:
            for batch in batches:
                rate, before, after = _decode(llm, batch, vocab)
                context = PROMPT + (SHORT + LONG) // 2
                bound = bytes_per_s / read_bytes(target, batch, context) * batch
                is_plain = method == PLAIN
                plain[batch] = rate if is_plain else plain[batch]
                yield DecodingSpeed(
                    models.target,
                    method,
                    batch,
                    rate,
                    rate / bound if is_plain else None,
                    None if is_plain else rate / plain[batch],
                    _accepted(before, after),
                    _phases(before, after),
                )


def _decode(llm: LLM, batch: int, vocab: int) -> tuple[float, EngineStats, EngineStats]:
    """Return tokens a second of decoding, and the engine's counters before and after the long runs.

    Of few rows, several sets of prompts are measured: the draft tokens of one are accepted more or less often.
    """
    sets = [prompts(batch, PROMPT, vocab, seed) for seed in range(-(-FEW_ROWS // batch))]
    for asked in sets:
        _run(llm, asked, SHORT)
    short_s, before = sum(_run(llm, asked, SHORT) for asked in sets), llm.stats()
    long_s = sum(_run(llm, asked, LONG) for asked in sets)
    return batch * len(sets) * (LONG - SHORT) / (long_s - short_s), before, llm.stats()


def _run(llm: LLM, asked: list[tuple[int, ...]], max_tokens: int) -> float:
    given = [{"prompt_token_ids": list(ids)} for ids in asked]
    began = time.perf_counter()
    llm.generate(given, [params(i, max_tokens) for i in range(len(asked))], use_tqdm=False)
    return time.perf_counter() - began


def _accepted(before: EngineStats, after: EngineStats) -> float | None:
    proposed = after.proposed - before.proposed
    return (after.accepted - before.accepted) / proposed if proposed else None


def _phases(before: EngineStats, after: EngineStats) -> tuple[float, float, float, float]:
    steps, first, last = after.steps - before.steps, before.phases, after.phases
    totals = (
        last.propose_s - first.propose_s,
        last.transfer_s - first.transfer_s,
        last.score_s - first.score_s,
        last.verify_s - first.verify_s,
    )
    propose, transfer, score, verify = (1000 * total / steps for total in totals)
    return propose, transfer, score, verify
