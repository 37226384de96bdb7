"""Measured seconds of steps, for policies and for estimates. They are kept with the compiled forwards.

Later starts of the same models with the same options and number of threads read them, so they measure nothing.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from protos.config.engine import EngineConfig
from protos.messages import StepCosts
from workers.compiled import store

if TYPE_CHECKING:
    from workers.draft.engine import DraftEngine
    from workers.model.runner import ModelRunner

MEASURED_TOKENS = 512
"""The costs of steps are measured for up to this many tokens; beyond, they grow in proportion."""


def needs_step_costs(config: EngineConfig) -> bool:
    """Return True if the policy reads the seconds of steps: to derive its threshold, or to adapt."""
    speculative = config.speculative
    if speculative is None:
        return False
    if speculative.policy_name == "adaptive":
        return True
    has_limit = speculative.disable_by_batch_size is not None
    return speculative.policy_name == "threshold" and not has_limit and not config.model.enforce_eager


def without_disturbed(seconds: Mapping[int, float]) -> dict[int, float]:
    """Return the seconds of each size, or of a larger one that took less: the size's own measurement was disturbed."""
    fastest: dict[int, float] = {}
    least = math.inf
    for size in sorted(seconds, reverse=True):
        fastest[size] = least = min(least, seconds[size])
    return fastest


@dataclass(frozen=True)
class Measurement:
    """What is measured, on one or both models of a process.

    Args:
        config: a parsed configuration.
        runner: of the target; None: it is in another process.
        draft: None if there is none in this process.
        pace_tokens: the target is measured for up to this many tokens even if no policy needs it.
        keys: of the compiled entries that run; None if something that could be compiled runs eager.
    """

    config: EngineConfig
    runner: "ModelRunner | None"
    draft: "DraftEngine | None"
    pace_tokens: int = 0
    keys: tuple[str, ...] | None = None

    def costs(self) -> StepCosts:
        """Return costs of earlier starts, or measure them. `target_s` and `draft_s` are empty if nobody needs them."""
        return next(costs for costs in self.stages() if costs is not None)

    def stages(self) -> Iterator[StepCosts | None]:
        """Measure one size at a time, with None in between; the last value is the result."""
        key = self._key
        kept = store.read_costs(key) if self._is_kept else None
        if kept is not None:
            yield StepCosts(*({int(size): seconds for size, seconds in part.items()} for part in kept))
            return
        target_s, draft_s = {}, {}
        # The largest first: by then weights and kernels are in the caches, as they are between steps.
        for size in reversed(self._target_sizes()):
            assert self.runner is not None
            target_s[size] = self.runner.measure_size(size)
            yield None
        if self.draft is not None and needs_step_costs(self.config):
            num_rows, k = min(MEASURED_TOKENS, self.config.scheduler.max_num_seqs), self.config.max_draft
            for size, seconds in self.draft.measure(num_rows, k):
                draft_s[size] = seconds
                yield None
            self.draft.worker.slots.clear()
        costs = StepCosts(without_disturbed(target_s), without_disturbed(draft_s))
        if self._is_kept and key == self._key:  # else the number of threads has changed meanwhile
            store.write_costs(key, [costs.target_s, costs.draft_s])
        yield costs

    def _target_sizes(self) -> list[int]:
        wanted = max(MEASURED_TOKENS if needs_step_costs(self.config) else 0, self.pace_tokens)
        most = min(wanted, self.config.scheduler.max_num_seqs * (self.config.max_draft + 1))
        if self.runner is None or not most:
            return []
        return [1 << power for power in range((most - 1).bit_length() + 1)]

    @property
    def _is_kept(self) -> bool:
        """Whether everything that is measured runs compiled; eager costs are not worth keeping."""
        models = (self.runner, self.draft)
        return self.keys is not None and len(self.keys) == sum(model is not None for model in models)

    @property
    def _key(self) -> str:
        scheduler = self.config.scheduler
        threads = torch.get_num_threads()
        parts = (self.keys, self._target_sizes(), scheduler.max_num_seqs, self.config.speculative, threads)
        return hashlib.sha256(repr(("costs", *parts)).encode()).hexdigest()[:32]
