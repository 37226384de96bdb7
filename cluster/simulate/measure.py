"""Measures what rounds cost: rounds of the engine over made-up text, at several batch sizes and contexts."""

import logging
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self

import torch
from msgspec import structs

from cluster.assemble import Assembled
from cluster.simulate.costs import CostTable, Seconds, Shape, draft_key
from cluster.simulate.requests import RecordedSampling
from cluster.simulate.setup import build, needs_target
from protos.config.engine import EngineConfig, SpeculativeConfig
from protos.draft import Draft, DraftRow
from protos.draft_module import DraftRunner
from protos.errors import ConfigError
from protos.messages import Request
from protos.progress import ProgressCallback
from protos.sampling import SamplingParams
from runtime.text.prompts import Prompt

logger = logging.getLogger(__name__)

WARM_ROUNDS, TIMED_ROUNDS = 2, 3
"""The first rounds in which all rows decode are not timed: a draft still reads the prompts."""
PASSES = 3
"""Everything is measured so often, in turns: what else the machine does for a while then affects all alike. The median
of all rounds counts."""


class FixedDraft:
    """Drafts the same token as often as asked: costs nothing, and is never accepted."""

    on_worker: ClassVar[bool] = False
    TOKEN = 0

    @classmethod
    def create(cls, config: SpeculativeConfig, runner: DraftRunner | None) -> Self:
        """See `Proposer`."""
        return cls()

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        """See `Proposer`."""
        return [Draft((self.TOKEN,) * row.length) for row in rows]


FIXED = f"{__name__}:{FixedDraft.__name__}"


@dataclass(frozen=True)
class Measuring:
    """What to measure: batch sizes, known tokens of a row, and numbers of draft tokens."""

    rows: Seq[int]
    contexts: Seq[int]
    ks: Seq[int]

    def shapes(self) -> Iterator[Shape]:
        """Yield all combinations."""
        yield from ((rows, context) for context in self.contexts for rows in self.rows)


def machine() -> dict[str, str]:
    """Return what the speed of this machine depends on."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "accelerator": device,
        "torch": str(torch.__version__),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    found = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return found or platform.processor() or platform.machine()


def measure(
    configs: Seq[EngineConfig], what: Measuring, report: ProgressCallback, tick: Callable[[], None]
) -> CostTable:
    """Measure the target of *configs*, which is the same in all, and the draft of each.

    *tick* is called `num_measurements` times at most: shapes that the KV cache cannot hold are left out.
    """
    first = configs[0]
    most = max(what.ks)
    fixed = SpeculativeConfig(method=FIXED, num_speculative_tokens=most)
    target = build(replace(first, speculative=fixed), report, with_target=True)
    dtype = target.info.dtype
    rounds = _rounds(target, what, (0, *what.ks), report, tick)
    target_s = {shape: {k + 1: seconds for k, (_, seconds) in by_k.items()} for shape, by_k in rounds.items()}
    if not target_s:
        raise ConfigError(
            f"nothing was measured: no batch of {min(what.rows)} rows of {min(what.contexts)} tokens or more fits the "
            "KV cache and the context"
        )
    drafts: dict[str, Seconds] = {}
    for config in configs:
        speculative = config.speculative
        assert speculative is not None, "checked by the caller"
        longest = replace(speculative, num_speculative_tokens=max(most, speculative.num_speculative_tokens))
        with_longest = replace(config, speculative=longest)
        draft = build(with_longest, report, with_target=needs_target(with_longest))
        rounds = _rounds(draft, what, what.ks, report, tick)
        drafts[draft_key(longest)] = {shape: {k: s for k, (s, _) in by_k.items()} for shape, by_k in rounds.items()}
    return CostTable(first.model.model, dtype, machine(), target_s, drafts)


def num_measurements(num_drafts: int, what: Measuring) -> int:
    """Return how many combinations `measure` runs."""
    return PASSES * len(list(what.shapes())) * (1 + len(what.ks) * (1 + num_drafts))


Rounds = dict[Shape, dict[int, tuple[float, float]]]


def _rounds(
    assembled: Assembled, what: Measuring, ks: Seq[int], report: ProgressCallback, tick: Callable[[], None]
) -> Rounds:
    """Return the seconds of drafting and the other seconds of a round, by shape and K; shuts the engine down."""
    timed: dict[tuple[Shape, int], list[tuple[float, float]]] = {}
    try:
        shapes = [shape for shape in what.shapes() if _fits(assembled, shape, max(ks))]
        for rows, context in set(what.shapes()).difference(shapes):
            report(f"{rows} rows of {context} tokens do not fit the KV cache or the context: not measured")
        for shape, k in [(shape, k) for _ in range(PASSES) for shape in shapes for k in ks]:
            timed.setdefault((shape, k), []).extend(_time(assembled, shape, k))
            tick()
    finally:
        assembled.shutdown()
    found: Rounds = {}
    for (shape, k), rounds in timed.items():
        drafting_s, rest_s = (statistics.median(each) for each in zip(*rounds, strict=True))
        found.setdefault(shape, {})[k] = max(0.0, drafting_s), max(1e-9, rest_s)
    return found


def _fits(assembled: Assembled, shape: Shape, k: int) -> bool:
    info, (rows, context) = assembled.info, shape
    longest = context + WARM_ROUNDS + TIMED_ROUNDS + 2 * (k + 1)
    blocks = rows * -(-longest // info.block_size)
    too_many = rows > assembled.config.scheduler.max_num_seqs
    tokens = rows * (k + 1)
    if tokens > assembled.config.scheduler.max_num_batched_tokens:
        return False
    return not too_many and blocks <= info.num_blocks and longest <= info.max_model_len


def _time(assembled: Assembled, shape: Shape, k: int) -> list[tuple[float, float]]:
    """Return the seconds of drafting and of the rest, for rounds in which all rows decode."""
    rows, context = shape
    assembled.inbox.put([_request(assembled, context, k, number) for number in range(rows)])  # type: ignore[attr-defined]
    controller = assembled.controller
    rounds, left, before = [], rows, controller.stats().phases
    while left:
        began = time.perf_counter()
        outputs = controller.step()
        took = time.perf_counter() - began
        phases = controller.stats().phases
        draft_s, before = phases.propose_s - before.propose_s, phases
        left -= sum(output.finish_reason is not None for output in outputs)
        if sum(bool(output.token_ids) for output in outputs) == rows:
            rounds.append((draft_s, took - draft_s))
    return rounds[WARM_ROUNDS:-1] or rounds


def _request(assembled: Assembled, context: int, k: int, number: int) -> Request:
    """Return a request for random tokens after random ones, so that hardly a draft token is accepted."""
    vocab_size, count = assembled.info.vocab_size, WARM_ROUNDS + TIMED_ROUNDS + 1
    prompt = _tokens(f"prompt {number}", context, vocab_size)  # the same for every K: computed once, then cached
    output = _tokens(f"output {context} {k} {number}", count, vocab_size)
    limit = len(output) + k + 1  # so that the last rounds may still draft k tokens
    params = SamplingParams(temperature=0.0, max_tokens=limit)
    (request,) = assembled.preprocessor.requests(Prompt(None, prompt), params, str(number))
    recorded = RecordedSampling(**structs.asdict(request.sampling), output_token_ids=output)
    return structs.replace(request, sampling=recorded, eos_ids=(), speculate=k > 0, num_speculative_tokens=k or None)


def _tokens(seed: str, count: int, vocab_size: int) -> tuple[int, ...]:
    drawn = random.Random(seed)
    return tuple(drawn.randrange(1, vocab_size) for _ in range(count))
