"""A controller in this process driven step by step, and requests for it."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from cluster import assemble
from protos.config.arguments import parse
from protos.config.engine import EngineConfig
from protos.messages import Abort, Request, RoundPlan, Sampling, Verdict
from protos.sampling import SamplingParams
from protos.worker_messages import Drafted, Port, RoundDone, WorkerGroup
from runtime.core.controller import LocalInbox
from runtime.supervision.distributed_executor import DistributedExecutor
from tests.support.distributed.thread_workers import ThreadPort, ThreadWorkerGroup
from tests.support.models.tiny_models import build, perturb
from tests.support.policies import always
from workers.process import main as rank

K = 3
PATIENT_S = 5.0
"""A deadline that a busy machine meets; tests of late and dead drafts set shorter ones."""
Models = tuple[Path, Path]


def tiny_pair(folder: Path, family: str = "llama", noise: float = 0.05) -> Models:
    """Save a tiny target whose vocabulary no number of ranks divides, and a perturbed copy as its draft."""
    target = build(family, folder / "target", vocab_size=97)
    return target, perturb(target, folder / "draft", noise=noise)


@contextmanager
def quick_turns() -> Iterator[None]:
    """Switch threads often: ranks in threads wait for each other many times per layer."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(0.0002)
    yield
    sys.setswitchinterval(usual)


def assert_same(outputs: dict[str, list[int]], plain: dict[str, list[int]]) -> None:
    """Check that every output is a prefix of the plain run's."""
    assert outputs
    assert outputs == {name: plain[name][: len(ids)] for name, ids in outputs.items()}


def configure(models: Models, *, draft: bool = True, **arguments: Any) -> EngineConfig:
    speculative = {
        "method": "draft_model",
        "model": str(models[1]),
        "num_speculative_tokens": K,
        "placement": "dedicated",
    }
    given = arguments.pop("speculative_config", speculative if draft else None)
    return parse(
        {
            "model": str(models[0]),
            "speculative_config": always(given),
            "dtype": "float32",
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "device": "cpu",
            "num_gpu_blocks_override": 64,
            "block_size": 4,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 24,
            "max_model_len": 128,
            **arguments,
        }
    )


def requests(count: int = 6, max_tokens: int = 30) -> list[Request]:
    """Return greedy and seeded requests of different lengths, some with a common prefix, more than run at once."""
    shared = [11, 12, 13, 14, 15, 16, 17, 18, 19]
    return [
        Request(
            request_id=str(i),
            prompt_token_ids=(*shared * (i % 2), *[5, 6, 7, 8 + i] * (2 + 3 * i)),
            params=SamplingParams(),
            max_tokens=max_tokens + i,
            sampling=Sampling(seed=i, temperature=0.0 if i % 3 else 1.0),
        )
        for i in range(count)
    ]


@dataclass
class Engine:
    """A controller over some executor, driven to the end; `rounds` records plans and verdicts."""

    built: assemble.Assembled
    workers: ThreadWorkerGroup | None = None
    rounds: list[tuple[RoundPlan, list[Verdict]]] = field(default_factory=list)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    reasons: dict[str, str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        inner = self.built.executor.run

        def run(plan: RoundPlan) -> list[Verdict]:
            verdicts = inner(plan)
            self.rounds.append((plan, verdicts))
            return verdicts

        self.built.executor.run = run  # type: ignore[method-assign]

    @property
    def changes(self) -> dict[str, int]:
        """How often the draft started or stopped serving, by reason."""
        return self.built.controller.stats().draft_changes

    def until_drafting(self, epoch: int) -> None:
        """Wait, without a round, until a draft serves in this epoch."""
        executor, end = self.built.executor, time.monotonic() + 60
        while executor.drafting.epoch < epoch:
            executor.poll()
            assert time.monotonic() < end, "the draft does not come back"
            time.sleep(0.01)

    @property
    def num_out(self) -> int:
        return sum(map(len, self.outputs.values()))

    def put(self, *commands: Request | Abort) -> None:
        self.built.inbox.put(commands)  # type: ignore[attr-defined]

    def step(self) -> None:
        for output in self.built.controller.step():
            self.outputs.setdefault(output.request_id, []).extend(output.token_ids)
            self.reasons[output.request_id] = output.error or output.finish_reason

    def until(self, done: Callable[[], bool], limit_s: float = 60.0) -> None:
        end = time.monotonic() + limit_s
        while not done():
            self.step()
            assert time.monotonic() < end, "it takes too long"

    def finish(self) -> dict[str, list[int]]:
        self.step()
        self.until(lambda: not self.built.controller.scheduler.num_unfinished)
        self.built.controller.scheduler.check_integrity()
        return self.outputs

    def proposed(self, first: int = 0, end: int | None = None) -> int:
        return sum(verdict.proposed for _, verdicts in self.rounds[first:end] for verdict in verdicts)

    @property
    def accepted(self) -> int:
        return sum(len(verdict.path) for _, verdicts in self.rounds for verdict in verdicts)

    @property
    def missed(self) -> int:
        """Drafts that target 0 waited for in vain."""
        assert self.workers is not None
        return sum(
            message.draft_missed
            for port in self.workers.ports.values()
            for message in port.sent
            if isinstance(message, RoundDone)
        )

    @property
    def drafted(self) -> set[int]:
        """Rounds for which drafts were announced."""
        assert self.workers is not None
        return {
            message.round
            for port in self.workers.ports.values()
            for message in port.sent
            if isinstance(message, Drafted)
        }


def uni(models: Models, *, draft: bool) -> Engine:
    config = (
        configure(models, draft=draft, distributed_executor_backend="uni")
        if not draft
        else configure(
            models, speculative_config={"method": "draft_model", "model": str(models[1]), "num_speculative_tokens": K}
        )
    )
    return Engine(assemble.build(config, LocalInbox(), report=lambda line: None))


def outputs_without_drafts(models: Models) -> dict[str, list[int]]:
    """Return one process's outputs for all `requests` without drafts: every worker group must return the same."""
    engine = uni(models, draft=False)
    engine.put(*requests())
    outputs = engine.finish()
    assert engine.proposed() == 0
    return outputs


def over(workers: WorkerGroup, config: EngineConfig, backend: str = "") -> Engine:
    """Return an engine whose rounds *workers* run."""

    def make(config: EngineConfig, say: Any) -> DistributedExecutor:
        return DistributedExecutor(workers, config, say, backend=backend)

    threads = workers if isinstance(workers, ThreadWorkerGroup) else None
    return Engine(assemble.build(config, LocalInbox(), print, make), threads)


def threaded(
    config: EngineConfig,
    *,
    floor_s: float = PATIENT_S,
    body: Callable[[Port], None] | None = None,
    on_start: Callable[[ThreadPort], None] = lambda port: None,
    backend: str = "",
) -> Engine:
    """Return an engine over a worker group of threads."""
    return over(ThreadWorkerGroup(body or partial(rank.serve, floor_s=floor_s), on_start), config, backend)


def late_comer(may_come: threading.Event, floor_s: float = 1.0) -> Callable[[Port], None]:
    """Return a worker function in which a restarted draft waits for *may_come*."""

    def live(port: Port) -> None:
        assert isinstance(port, ThreadPort)
        if port.worker.role == "draft" and port.worker.incarnation:
            may_come.wait(60)
        rank.serve(port, floor_s=floor_s)

    return live


StartEngine = Callable[..., Engine]
