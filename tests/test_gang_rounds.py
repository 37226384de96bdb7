"""The round protocol over threads: the same tokens whatever happens to the draft or to the targets."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cluster import assemble
from protos.arguments import parse
from protos.config import EngineConfig
from protos.errors import EngineDeadError
from protos.gang import Plan, Port, RoundDone, WorkerId
from protos.messages import Abort, Request, RoundPlan, Sampling, Verdict, WorkerInfo
from protos.sampling import SamplingParams
from runtime.controller import LocalInbox
from runtime.gang import GangExecutor
from tests.thread_gang import ThreadGang, ThreadPort
from tests.tiny_models import build, perturb
from workers import rank

K = 3
PATIENT_S = 20.0
"""A deadline that a busy test machine does not miss; tests of lateness set shorter ones."""
Models = tuple[Path, Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    target = build("llama", folder / "target", vocab_size=97)
    return target, perturb(target, folder / "draft")


def configure(models: Models, *, draft: bool = True, **arguments: Any) -> EngineConfig:
    speculative = {"method": "draft_model", "model": str(models[1]), "num_speculative_tokens": K,
                   "placement": "dedicated"}
    return parse({
        "model": str(models[0]), "speculative_config": speculative if draft else None, "dtype": "float32",
        "enforce_eager": True, "skip_tokenizer_init": True, "device": "cpu", "num_gpu_blocks_override": 64,
        "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 128, **arguments,
    })  # fmt: skip


def requests(count: int = 6, max_tokens: int = 30) -> list[Request]:
    """Greedy and seeded rows of unlike lengths, some with a shared beginning, more than run at once."""
    shared = [11, 12, 13, 14, 15, 16, 17, 18, 19]
    return [
        Request(
            request_id=str(i), prompt_token_ids=tuple([*shared * (i % 2), *([5, 6, 7, 8 + i] * (2 + 3 * i))]),
            params=SamplingParams(), max_tokens=max_tokens + i,
            sampling=Sampling(seed=i, temperature=0.0 if i % 3 else 1.0),
        )
        for i in range(count)
    ]


@dataclass
class Engine:
    """A controller over some executor, driven to the end; `rounds` has what was planned and found."""

    built: assemble.Assembled
    gang: ThreadGang | None = None
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
        return sum(verdict.accepted for _, verdicts in self.rounds for verdict in verdicts)

    @property
    def missed(self) -> int:
        """Deadlines that target 0 let pass in vain."""
        assert self.gang is not None
        return sum(message.draft_missed for port in self.gang.ports.values() for message in port.sent
                   if isinstance(message, RoundDone))  # fmt: skip

    @property
    def drafted(self) -> int:
        assert self.gang is not None
        return self.gang.num_drafted()


def uni(models: Models, *, draft: bool) -> Engine:
    config = configure(models, draft=draft, distributed_executor_backend="uni") if not draft else configure(
        models, speculative_config={"method": "draft_model", "model": str(models[1]), "num_speculative_tokens": K})
    return Engine(assemble.build(config, LocalInbox(), say=lambda line: None))


@pytest.fixture(scope="module")
def plain(models: Models) -> dict[str, list[int]]:
    """What every run must say."""
    engine = uni(models, draft=False)
    engine.put(*requests())
    outputs = engine.finish()
    assert engine.proposed() == 0
    return outputs


StartGang = Callable[..., Engine]


@pytest.fixture
def gang(models: Models) -> Iterator[StartGang]:
    started: list[Engine] = []

    def start(*, floor_s: float = PATIENT_S, on_start: Callable[[ThreadPort], None] = lambda port: None,
              body: Callable[[Port], None] | None = None, **arguments: Any) -> Engine:
        workers = ThreadGang(body or partial(rank.serve, floor_s=floor_s), on_start)

        def make(config: EngineConfig, say: Any) -> GangExecutor:
            return GangExecutor(workers, config, say)

        built = assemble.build(configure(models, **arguments), LocalInbox(), print, make)
        started.append(Engine(built, workers))
        return started[-1]

    yield start
    for engine in started:
        engine.built.shutdown()


def test_uni_with_a_draft_says_the_same(models: Models, plain: dict[str, list[int]]) -> None:
    engine = uni(models, draft=True)
    engine.put(*requests())
    assert engine.finish() == plain
    assert engine.proposed() > engine.accepted > 0


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("draft", [True, False], ids=["draft", "off"])
def test_a_gang_says_what_one_process_says(
    gang: StartGang, plain: dict[str, list[int]], world: int, draft: bool
) -> None:
    engine = gang(tensor_parallel_size=world, draft=draft)
    engine.put(*requests())
    assert engine.finish() == plain
    if draft:
        assert engine.proposed() > engine.accepted > 0
        assert engine.missed == 0
    else:
        assert engine.proposed() == engine.drafted == 0
