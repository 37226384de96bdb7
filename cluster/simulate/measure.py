"""Measures what rounds cost: rounds of the engine over made-up text, at several batch sizes and contexts."""

import itertools
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, Self

import torch
from msgspec import structs

from cluster import assemble
from cluster.assemble import Assembled
from cluster.simulate.costs import CostTable, PromptSeconds, Seconds, Shape, draft_key
from cluster.simulate.executors import free_memory
from cluster.simulate.made_up import FIXED, make_executor
from cluster.simulate.setup import in_every_round
from protos.config.engine import EngineConfig, ModelConfig, SpeculativeConfig
from protos.errors import ConfigError
from protos.messages import Request
from protos.progress import ProgressCallback
from protos.sampling import SamplingParams
from runtime.text.prompts import Prompt
from workers.model.loader import pick_device, pick_dtype
from workers.weights.hub import read_config

WARM_ROUNDS, TIMED_ROUNDS = 2, 12
"""The first rounds in which all rows decode are not timed: a draft still reads the prompts."""
PASSES = 6
"""Everything is measured so often, in turns: what else the machine does for a while then affects all alike."""
TEMPERATURES = 0.0, 1.0
"""Of requests, by turns: sampling costs time."""


@dataclass(frozen=True)
class Measuring:
    """What to measure: batch sizes, known tokens of a row, and numbers of draft tokens."""

    rows: Seq[int]
    contexts: Seq[int]
    ks: Seq[int]

    def with_powers(self) -> "Measuring":
        """Return the same with more numbers of draft tokens, between which costs are interpolated."""
        most = max(self.ks)
        return replace(self, ks=sorted({*self.ks, *(1 << power for power in range(most.bit_length()))}))

    def shapes(self) -> Iterator[Shape]:
        """Yield all combinations."""
        yield from ((rows, context) for context in self.contexts for rows in self.rows)


class StepSeconds(NamedTuple):
    """Seconds of a step, those of them for drafting, draft tokens scored, and rows that gained tokens in it."""

    seconds: float
    draft_s: float
    num_scored: int
    num_rows: int


class RoundSeconds(NamedTuple):
    """Means of rounds: seconds, those of them for drafting, and draft tokens scored of a row."""

    seconds: float
    draft_s: float
    scored: float

    @classmethod
    def of(cls, steps: Seq[StepSeconds], num_rows: int) -> Self:
        """Return the means of *steps* of so many rows, without the slowest fifth, some of which were disturbed."""
        kept = sorted(steps)[: -(-len(steps) * 4 // 5)]
        return cls(
            fmean(step.seconds for step in kept),
            fmean(step.draft_s for step in kept),
            fmean(step.num_scored for step in kept) / num_rows,
        )

    @property
    def without_draft(self) -> float:
        """The other seconds."""
        return max(1e-9, self.seconds - self.draft_s)


class EngineSeconds(NamedTuple):
    """Of one engine: its rounds by shape and K; by K and length, how much longer rounds take that read a prompt."""

    rounds: Mapping[Shape, Mapping[int, RoundSeconds]]
    prompts: Mapping[int, PromptSeconds]


def machine() -> dict[str, str]:
    """Return what the speed of this machine depends on."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "accelerator": device,
        "torch": str(torch.__version__),
    }


def setting(model: ModelConfig) -> dict[str, str]:
    """Return how a target is loaded and run, which its speed depends on; its weights are not read."""
    device = pick_device(model.device)
    return {
        "dtype": _dtype(model, device),
        "quantization": model.quantization or "as stored",
        "KV cache": model.kv_cache_dtype,
        "device": device.type,
        "execution": "eager" if model.enforce_eager else "compiled",
        "batch-invariant": "yes" if model.batch_invariant else "no",
        "threads": str(model.num_threads or "auto"),
    }


def _dtype(model: ModelConfig, device: torch.device) -> str:
    """Return the dtype of a target; "auto" where only its weights tell."""
    described = read_config(model)
    if model.dtype == "auto" and not (described.get("dtype") or described.get("torch_dtype")):
        return model.dtype
    return str(pick_dtype(model.dtype, described, Path(), device)[0]).removeprefix("torch.")


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
    target = _build(first, fixed, report)
    dtype = target.info.dtype
    alone = _measured(target, what.with_powers(), report, tick)
    target_s = {shape: {k + 1: one.without_draft for k, one in by_k.items()} for shape, by_k in alone.rounds.items()}
    if not target_s:
        raise ConfigError(
            f"nothing was measured: no batch of {min(what.rows)} rows of {min(what.contexts)} tokens or more fits the "
            "KV cache and the context"
        )
    table = CostTable(first.model.model, dtype, setting(first.model), machine(), target_s, prompts=alone.prompts[0])
    drafts: dict[str, Seconds] = {}
    draft_prompts: dict[str, PromptSeconds] = {}
    for config in configs:
        speculative = config.speculative
        assert speculative is not None, "checked by the caller"
        longest = replace(speculative, num_speculative_tokens=max(most, speculative.num_speculative_tokens))
        # With the target, which leaves other data in the processor's caches than a draft that runs alone.
        engine = _build(config, longest, report)
        found, key = _measured(engine, what, report, tick), draft_key(longest)
        drafts[key] = {shape: _drafting(shape, by_k, table) for shape, by_k in found.rounds.items()}
        before_s, with_drafts_s = found.prompts[0], found.prompts[most]
        draft_prompts[key] = {size: max(0.0, with_drafts_s[size] - before_s[size]) for size in before_s}
    return replace(table, drafts=drafts, draft_prompts=draft_prompts)


def _build(config: EngineConfig, speculative: SpeculativeConfig, report: ProgressCallback) -> Assembled:
    """Return an engine that drafts in every round."""
    free_memory()
    with_drafts = replace(config, speculative=in_every_round(speculative))
    return assemble.build(with_drafts, None, report, make_executor)


def _drafting(shape: Shape, by_k: Mapping[int, RoundSeconds], table: CostTable) -> dict[int, float]:
    """Return how much longer rounds take than the target's alone with as many tokens, by K.

    The speed of a machine changes. So what was measured is scaled by the engine's rounds without draft tokens.
    """
    slowdown = by_k[0].seconds / table.plain_s(shape)
    return {k: max(0.0, one.seconds / slowdown - table.target_s(shape, 1 + one.scored)) for k, one in by_k.items() if k}


def num_measurements(num_drafts: int, what: Measuring) -> int:
    """Return how many combinations `measure` runs."""
    num_shapes, num_prompts = len(list(what.shapes())), 2 * len(what.contexts) * (1 + num_drafts)
    num_ks = 1 + len(what.with_powers().ks) + num_drafts * (1 + len(what.ks))
    return PASSES * (num_shapes * num_ks + num_prompts)


def _measured(
    assembled: Assembled, what: Measuring, report: ProgressCallback, tick: Callable[[], None]
) -> EngineSeconds:
    """Measure an engine without draft tokens and with each K, prompts without and with the largest; shut it down."""
    timed: dict[tuple[Shape, int], list[StepSeconds]] = {}
    read: dict[tuple[int, int], list[float]] = {}
    most = max(what.ks)
    try:
        shapes = [shape for shape in what.shapes() if _fits(assembled, shape, most)]
        for rows, context in set(what.shapes()).difference(shapes):
            report(f"{rows} rows of {context} tokens do not fit the KV cache or the context: not measured")
        contexts = sorted({context for _, context in shapes})
        for number in range(PASSES):
            for context, k in itertools.product(contexts, (0, most)):
                read.setdefault((context, k), []).append(_time_prompt(assembled, context, k, number))
                tick()
            for shape, k in itertools.product(shapes, (0, *what.ks)):
                timed.setdefault((shape, k), []).extend(_time(assembled, shape, k, TEMPERATURES[number % 2]))
                tick()
    finally:
        assembled.shutdown()
    rounds: dict[Shape, dict[int, RoundSeconds]] = {}
    for (shape, k), steps in timed.items():
        rounds.setdefault(shape, {})[k] = RoundSeconds.of(steps, shape[0])
    prompts = {k: {size: statistics.median(read[size, k]) for size in contexts} for k in (0, most)}
    return EngineSeconds(rounds, prompts)


def _fits(assembled: Assembled, shape: Shape, k: int) -> bool:
    info, (rows, context) = assembled.info, shape
    longest = context + _num_tokens(k) + k + 1
    blocks = rows * -(-longest // info.block_size)
    too_many = rows > assembled.config.scheduler.max_num_seqs
    tokens = rows * (k + 1)
    if tokens > assembled.config.scheduler.max_num_batched_tokens:
        return False
    return not too_many and blocks <= info.num_blocks and longest <= info.max_model_len


def _time(assembled: Assembled, shape: Shape, k: int, temperature: float) -> list[StepSeconds]:
    """Return the seconds of rounds in which all rows decode."""
    rows, context = shape
    names = [f"prompt {number}" for number in range(rows)]  # the same for every K: computed once, then cached
    steps = _steps(assembled, [_request(assembled, name, context, k, temperature) for name in names])
    full = [step for step in steps if step.num_rows == rows]
    return full[WARM_ROUNDS:-1] or full


def _time_prompt(assembled: Assembled, context: int, k: int, number: int) -> float:
    """Return how much longer rounds take until a prompt of *context* tokens, the *number*-th of them, is read."""
    steps = _steps(assembled, [_request(assembled, f"uncached prompt {number} for {k}", context, k, 0.0)])
    first = next(index for index, step in enumerate(steps) if step.num_rows) + 1 + WARM_ROUNDS
    usual_s = statistics.median(step.seconds for step in steps[first:-1] or steps[-1:])
    return max(0.0, sum(step.seconds for step in steps[:first]) - (1 + WARM_ROUNDS) * usual_s)


def _steps(assembled: Assembled, requests: Seq[Request]) -> list[StepSeconds]:
    """Run *requests* to their end."""
    assembled.inbox.put(requests)  # type: ignore[attr-defined]  # a `LocalInbox`
    controller = assembled.controller
    steps, left, before = [], len(requests), controller.stats()
    while left:
        began = time.perf_counter()
        outputs = controller.step()
        seconds = time.perf_counter() - began
        after = controller.stats()
        draft_s, num_scored = after.phases.propose_s - before.phases.propose_s, after.proposed - before.proposed
        before = after
        left -= sum(output.finish_reason is not None for output in outputs)
        steps.append(StepSeconds(seconds, draft_s, num_scored, sum(bool(output.token_ids) for output in outputs)))
    return steps


def _request(assembled: Assembled, name: str, context: int, k: int, temperature: float) -> Request:
    """Return a request of *context* random tokens that takes as many rounds as are wanted, and some more or less."""
    drawn = random.Random(name)
    prompt = tuple(drawn.randrange(1, assembled.info.vocab_size) for _ in range(context))
    params = SamplingParams(temperature=temperature, seed=0, max_tokens=_num_tokens(k))
    (request,) = assembled.preprocessor.requests(Prompt(None, prompt), params, name)
    return structs.replace(request, eos_ids=(), speculate=k > 0, num_speculative_tokens=k or None)


def _num_tokens(k: int) -> int:
    """Return how many tokens the wanted rounds bring, of half of which the draft tokens are accepted."""
    return (WARM_ROUNDS + TIMED_ROUNDS + 2) * (2 + k) // 2
