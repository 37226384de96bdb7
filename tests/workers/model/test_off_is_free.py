"""Speculation that is configured but off costs nothing: same plans, same forward shapes, same operators."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cluster import assemble
from protos.config.arguments import parse
from protos.interfaces import Executor
from protos.messages import Request, RoundPlan, Sampling, Verdict, WorkerInfo
from protos.sampling import SamplingParams
from runtime.core.controller import LocalInbox
from tests.support.in_one_process import InOneProcess
from tests.support.models.tiny_models import build

ALWAYS_OFF = [[1, 1000, 0]]


class Operators(TorchDispatchMode):
    """Counts operators by name and input shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, tuple[torch.Size, ...]]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes = tuple(value.shape for value in args if isinstance(value, torch.Tensor))
        self.counts[str(func), shapes] += 1
        return func(*args, **(kwargs or {}))


@dataclass
class Recorder(InOneProcess):
    """An executor that records every plan, and the operators that ran for it."""

    inner: Executor
    plans: list[RoundPlan] = field(default_factory=list)
    operators: list[Counter[Any]] = field(default_factory=list)

    def start(self) -> WorkerInfo:
        return self.inner.start()

    def run(self, plan: RoundPlan) -> list[Verdict]:
        with Operators() as seen:
            verdicts = self.inner.run(plan)
        self.plans.append(plan)
        self.operators.append(seen.counts)
        return verdicts

    def shutdown(self) -> None:
        self.inner.shutdown()


@dataclass(frozen=True)
class Trace:
    plans: list[RoundPlan]
    operators: list[Counter[Any]]
    outputs: Mapping[str, list[int]]


def requests() -> list[Request]:
    """Rows of different lengths, greedy and sampled, more than fit at once; repetitive, so that n-grams match."""
    return [
        Request(
            request_id=str(i),
            prompt_token_ids=tuple([5, 6, 7, 8 + i] * (3 + 2 * i)),
            params=SamplingParams(),
            sampling=Sampling(seed=i, temperature=float(i % 2), top_p=0.9 if i % 2 else 1.0),
            max_tokens=8 + 3 * i,
        )
        for i in range(5)
    ]


def trace(target: Path, speculative: Mapping[str, Any] | None) -> Trace:
    config = parse(
        {
            "model": str(target),
            "speculative_config": speculative,
            "dtype": "float32",
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "device": "cpu",
            "num_gpu_blocks_override": 24,
            "block_size": 4,
            "max_num_seqs": 3,
            "max_num_batched_tokens": 16,
        }
    )
    inbox = LocalInbox()
    inbox.put(requests())
    engine = assemble.build(config, inbox, report=lambda line: None)
    controller = engine.controller
    controller.executor = executor = Recorder(engine.executor)
    outputs: dict[str, list[int]] = {request.request_id: [] for request in requests()}
    added = controller.step()
    while added or controller.scheduler.num_unfinished:
        for output in added:
            outputs[output.request_id] += output.token_ids
        added = controller.step()
    engine.shutdown()
    return Trace(executor.plans, executor.operators, outputs)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def speculative(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Configurations that speculate, by method."""
    draft = build("llama", tmp_path_factory.mktemp("draft"), seed=1, num_hidden_layers=1)
    return {
        "draft_model": {"model": str(draft), "num_speculative_tokens": 3},
        "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    }


@pytest.fixture(scope="module")
def plain(target: Path) -> Trace:
    return trace(target, None)


@pytest.mark.parametrize("method", ["draft_model", "ngram"])
def test_configured_but_off_does_exactly_what_unconfigured_does(
    target: Path, plain: Trace, speculative: dict[str, dict[str, Any]], method: str
) -> None:
    off = trace(target, {**speculative[method], "num_speculative_tokens_per_batch_size": ALWAYS_OFF})
    assert off.plans == plain.plans
    assert off.operators == plain.operators
    assert off.outputs == plain.outputs


@pytest.mark.parametrize("method", ["draft_model", "ngram"])
def test_the_comparison_would_notice_speculation(
    target: Path, plain: Trace, speculative: dict[str, dict[str, Any]], method: str
) -> None:
    on = trace(target, speculative[method])
    assert sum(row.k for plan in on.plans for row in plan.rows) > 0
    assert on.operators != plain.operators
    assert on.outputs == plain.outputs
