"""Answers of an engine in this process, and how checks compare and report them."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from cluster.check.engine_run import EngineRun, RunJob
from cluster.settings import engine_config
from protos.errors import SlipstreamError
from protos.progress import ProgressCallback
from protos.sampling import SamplingParams

Ids = Sequence[int]
Check = tuple[str, Callable[[], str]]
"""The name of a check, and what runs it: it returns what was found, or raises."""
OFF: dict[str, Any] = {"speculative_config": None}
COMMON = {"skip_tokenizer_init": True, "disable_log_stats": True}
SMALL = {"num_gpu_blocks_override": 512, "max_num_seqs": 8}
"""Of checks: fewer rows have fewer graphs, so that engines start sooner."""


def arguments(device: str, **more: Any) -> dict[str, Any]:
    """Return an engine's arguments: fp32, unless *more* says otherwise."""
    return {"device": device, "dtype": "float32", **SMALL, **COMMON, **more}


def prompts(count: int, length: int, vocab: int, seed: int = 3) -> list[tuple[int, ...]]:
    """Return *count* prompts of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [tuple(row) for row in torch.randint(vocab, (count, length), generator=generator).tolist()]


def params(number: int, max_tokens: int, temperature: float = 0.0) -> SamplingParams:
    """Return the parameters of the request with this number, which seeds it."""
    return SamplingParams(
        temperature=temperature, seed=number, max_tokens=max_tokens, ignore_eos=True, detokenize=False
    )


def answered(
    given: dict[str, Any], asked: Sequence[Ids], max_tokens: int, temperature: float, report: ProgressCallback
) -> tuple[list[tuple[int, ...]], float | None]:
    """Return the tokens of an engine with the arguments *given*, and the share of draft tokens that it accepted."""
    jobs = [RunJob(tuple(ids), params(i, max_tokens, temperature)) for i, ids in enumerate(asked)]
    with EngineRun(engine_config(given), report) as run:
        tokens = [answer.token_ids for answer in run.answers(jobs, lambda: None)]
        counts = run.counts
    return tokens, counts.accepted / counts.proposed if counts.proposed else None


def attempted(what: str, check: Callable[[], str]) -> tuple[str, bool, str]:
    """Return the name of a check, whether it passed, and what it says, if only the error's text."""
    try:
        return what, True, check()
    except (SlipstreamError, AssertionError, RuntimeError) as error:
        text = f"{type(error).__name__}: {error}".strip()
        with suppress(RuntimeError):
            torch.cuda.empty_cache()
        return what, False, text.splitlines()[0][:300]


def assert_same(tokens: Sequence[Ids], expected: Sequence[Ids], side: str) -> None:
    """Raise `AssertionError` that names the first answer that differs, and where."""
    for number, (mine, theirs) in enumerate(zip(tokens, expected, strict=True)):
        if tuple(mine) != tuple(theirs):
            at = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), len(mine))
            raise AssertionError(f"{side}: answer {number} differs from token {at} on")
