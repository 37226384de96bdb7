"""The executor of an engine in one process: a target rank whose group has one member and whose draft is local."""

import logging

import torch
from msgspec import structs

from protos.config.engine import EngineConfig
from protos.interfaces import ALWAYS_UP, DraftService
from protos.kv_blocks import kv_summary, settle_blocks
from protos.messages import RoundPlan, StepCosts, Verdict, WorkerInfo
from protos.progress import ProgressCallback
from protos.stats import PhaseTimes
from protos.worker_messages import RoundDone
from workers.build import load_target, make_target, needs_step_costs
from workers.distributed.groups import Solo
from workers.process.target_rank import TargetRank

logger = logging.getLogger(__name__)


class UniExecutor:
    """An `Executor` without other processes: there is none to wait for, to lose or to rebuild."""

    def __init__(self, info: WorkerInfo, rank: TargetRank) -> None:
        self.info, self.rank = info, rank
        self._propose_s = self._score_s = self._verify_s = 0.0

    @property
    def drafting(self) -> DraftService:
        """See `Executor`."""
        return ALWAYS_UP

    @property
    def times(self) -> PhaseTimes:
        """See `Executor`."""
        return PhaseTimes(propose_s=self._propose_s, score_s=self._score_s, verify_s=self._verify_s)

    def start(self) -> WorkerInfo:
        """See `Executor`. Everything is loaded already."""
        return self.info

    def run(self, plan: RoundPlan) -> list[Verdict]:
        """See `Executor`."""
        done = self.rank.run(plan)
        assert done is not None, "a group of one has a result"
        self.rank.feed_back(plan, done)
        self._add(done)
        return list(done.verdicts)

    def poll(self) -> None:
        """See `Executor`."""

    def rebuild(self, for_s: float) -> bool:
        """See `Executor`."""
        return True

    def shutdown(self) -> None:
        """See `Executor`."""
        self.rank.close()

    def _add(self, done: RoundDone) -> None:
        self._propose_s += done.wait_s
        self._score_s += done.score_s
        self._verify_s += done.verify_s


def build_uni(config: EngineConfig, report: ProgressCallback = logger.info) -> UniExecutor:
    """Load everything *config* names into this process.

    Raises:
        ModelError, ConfigError: with what is wrong and the numbers.
    """
    if config.model.num_threads:
        torch.set_num_threads(config.model.num_threads)
    tp = Solo()
    loaded = load_target(config, tp, report, with_draft=True)
    info = loaded.info(config)
    info, allocate = settle_blocks(info, {"this process": info.num_blocks})
    for note in (*info.notes, kv_summary(info)):
        report(note)
    ready = make_target(config, loaded, allocate, report)
    costs = StepCosts(ready.step_s, ready.draft_s) if needs_step_costs(config) else None
    return UniExecutor(structs.replace(info, costs=costs), TargetRank(tp, ready.worker, ready.draft))
