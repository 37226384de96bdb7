"""Wrong acceptance rules for engines that speculate; the engine without speculation keeps the right one."""

import random
from collections.abc import Callable

import pytest
import torch

from protos.config.engine import SpeculativeConfig
from protos.draft import Draft
from workers import build
from workers.sampling.sampler import Sampler
from workers.verification import rejection_math as rules
from workers.verification.acceptance import AcceptanceRule, AcceptedTokens, SampleAndMatch, Scored
from workers.verification.factory import make_acceptance_rule

LENIENT = 0.05


class Lenient(SampleAndMatch):
    """Accepts 5 % of draft tokens that differ from the target's token."""

    def __init__(self, sampler: Sampler) -> None:
        super().__init__(sampler)
        self._random = random.Random(4)

    def accept(self, scored: Scored) -> list[AcceptedTokens]:
        chosen_N, at = self._sample(scored), 0
        found = []
        for draft, count in zip(scored.drafts, scored.counts_R.tolist(), strict=True):
            if count:
                found.append(self._walk(draft, chosen_N[at : at + count]))
                at += count
        return found

    def _walk(self, draft: Draft, sampled: list[int]) -> AcceptedTokens:
        path: list[int] = []
        for node, token in enumerate(draft.tokens):
            if token != sampled[node] and self._random.random() >= LENIENT:
                break
            path.append(node)
        return AcceptedTokens(path, [*(draft.tokens[node] for node in path), sampled[len(path)]])


class BonusByOtherNoise(SampleAndMatch):
    """Samples the token after a fully accepted draft with the noise of another index."""

    def accept(self, scored: Scored) -> list[AcceptedTokens]:
        found, at = [], 0
        releases = iter(super().accept(scored))
        for draft, count in zip(scored.drafts, scored.counts_R.tolist(), strict=True):
            if count:
                release = next(releases)
                is_bonus = draft.tokens and len(release.path) == len(draft)
                found.append(self._with_other_bonus(scored, at + count - 1, release) if is_bonus else release)
                at += count
        return found

    def _with_other_bonus(self, scored: Scored, at: int, release: AcceptedTokens) -> AcceptedTokens:
        rows = slice(at, at + 1)
        logits_1V, slots_1, index_1 = scored.logits_NV[rows], scored.slots_N[rows], scored.index_N[rows]
        (bonus,) = self._sampler.sample(logits_1V, slots_1, index_1 + 100_003).tolist()
        return AcceptedTokens(release.path, [*release.emitted[:-1], bonus])


class IndexOffByOne(SampleAndMatch):
    """Samples after draft tokens with the noise of the next position."""

    def accept(self, scored: Scored) -> list[AcceptedTokens]:
        starts = torch.tensor(scored.counts_R).cumsum(0).tolist()
        first_N = torch.zeros(len(scored.index_N), dtype=torch.int64)
        first_N[[start for start in [0, *starts[:-1]] if start < len(first_N)]] = 1
        return super().accept(scored._replace(index_N=scored.index_N + (1 - first_N).numpy()))


BUGS: dict[str, Callable[[Sampler], AcceptanceRule]] = {
    "lenient": Lenient,
    "bonus by other noise": BonusByOtherNoise,
    "index off by one": IndexOffByOne,
}


def plant(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make engines that speculate verify by the wrong rule *name*."""

    def wrong(speculative: SpeculativeConfig | None, sampler: Sampler) -> AcceptanceRule:
        return make_acceptance_rule(None, sampler) if speculative is None else BUGS[name](sampler)

    monkeypatch.setattr(build, "make_acceptance_rule", wrong)


def resample_from_p(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make rejection sampling replace a rejected token by a sample from p instead of the residual."""
    monkeypatch.setattr(rules, "residual", lambda p_RV, *_: p_RV)
