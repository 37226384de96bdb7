"""Seven deliberate mistakes, patched into the real engine."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.support.exactness.cells import PAIRS, TREE, Cell
from tests.support.exactness.engine import Shape
from tests.support.exactness.statistics import Ints
from tests.support.exactness.texts import Texts
from workers.sampling.logits_processors import LogitsProcessors
from workers.sampling.noise import ACCEPT, row_keys, stream_seeds, uniform
from workers.sampling.sampler import Sampler
from workers.verification import rejection_math as rules
from workers.verification.acceptance import AcceptedTokens, SampleAndMatch, Scored
from workers.verification.rejection import RejectionSampler
from workers.verification.rejection_math import ChainBatch, Floats

LENIENCE = 0.02
Plant = Callable[[pytest.MonkeyPatch, Cell | Texts], None]


@dataclass(frozen=True)
class Bug:
    """A mistake, and a cell that detects it; with *quick* tokens or texts in the quick form, if that is enough."""

    name: str
    plant: Plant
    cell: Cell | Texts
    quick: int = 6_000


def too_lenient(patch: pytest.MonkeyPatch, cell: Cell | Texts) -> None:
    """2 % of the draft tokens that should be rejected are accepted."""
    acceptance_of = rules.standard_acceptance

    def lenient(chains: ChainBatch) -> Floats:
        accepted_RK = acceptance_of(chains)
        is_token_RK = np.arange(accepted_RK.shape[1]) < chains.counts_R[:, None]
        return np.where(is_token_RK, accepted_RK + LENIENCE * (1 - accepted_RK), 0.0)

    patch.setattr(rules, "standard_acceptance", lenient)


def too_lenient_coupled(patch: pytest.MonkeyPatch, cell: Cell | Texts) -> None:
    """2 % of the draft tokens that differ from the target's token are accepted."""
    sample = SampleAndMatch._sample

    def lenient(self: SampleAndMatch, scored: Scored) -> list[int]:
        chosen_N = np.array(sample(self, scored))
        draft_N = self._sampler.slots.tokens[scored.slots_N, scored.index_N]
        last_N = np.zeros(len(chosen_N), np.bool_)
        last_N[np.cumsum(scored.counts_R) - 1] = True
        dice_N = uniform(row_keys(scored.slots_N + ACCEPT, scored.index_N), np.zeros_like(chosen_N))
        return np.where((dice_N < LENIENCE) & ~last_N, draft_N, chosen_N).tolist()

    patch.setattr(SampleAndMatch, "_sample", lenient)


def resampling_from_p(patch: pytest.MonkeyPatch, cell: Cell | Texts) -> None:
    """After a rejection the token is sampled from p instead of the residual."""
    patch.setattr(rules, "residual", lambda p_RV, scale_R, at_M2, residual_M: p_RV)


def shared_noise(patch: pytest.MonkeyPatch, cell: Cell | Texts) -> None:
    """The draft samples and is verified with the target's noise, under the rule that needs independent noise."""
    for module in [module for name, module in sys.modules.items() if name.startswith("workers.")]:
        if getattr(module, "stream_seeds", None) is stream_seeds:
            patch.setattr(module, "stream_seeds", lambda seeds_N, stream, known_N: seeds_N)


def bonus_from_q(patch: pytest.MonkeyPatch, cell: Cell | Texts) -> None:
    """If all draft tokens are accepted, the token after them is the draft's."""
    assert isinstance(cell, Cell)
    draft_VV = torch.from_numpy(PAIRS[cell.pair][1])
    for rule in (SampleAndMatch, RejectionSampler):
        patch.setattr(rule, "accept", _with_bonus(rule.accept, draft_VV))


def _with_bonus(
    accept: Callable[..., list[AcceptedTokens]], draft_VV: torch.Tensor
) -> Callable[..., list[AcceptedTokens]]:
    def wrong(self: SampleAndMatch | RejectionSampler, scored: Scored) -> list[AcceptedTokens]:
        found = accept(self, scored)
        sampler = Sampler(self._sampler.slots, len(draft_VV))
        for row, draft, release in zip(scored.rows, scored.drafts, found, strict=True):
            if release.path and len(release.path) == len(draft):
                index = np.array([row.known_len + len(release.path)])
                release.emitted[-1] = int(
                    sampler.sample(draft_VV[release.emitted[-2]][None], np.array([row.slot]), index)
                )
        return found

    return wrong


def penalties_late(patch: pytest.MonkeyPatch, cell: Cell | Texts) -> None:
    """After a draft token, penalties do not count that token."""
    apply_ = LogitsProcessors.apply_

    def late(self: LogitsProcessors, logits_NV: torch.Tensor, slots_N: Ints, index_N: Ints) -> None:
        known_N = self._slots.known_len[slots_N]
        apply_(self, logits_NV, slots_N, index_N - (index_N > known_N))

    patch.setattr(LogitsProcessors, "apply_", late)


def off_by_one(patch: pytest.MonkeyPatch, cell: Cell | Texts) -> None:
    """After a draft token, the noise is that of the previous position."""
    sample = Sampler.sample

    def early(self: Sampler, logits_NV: torch.Tensor, slots_N: Ints, index_N: Ints) -> torch.Tensor:
        return sample(self, logits_NV, slots_N, index_N - (index_N > self.slots.known_len[slots_N]))

    patch.setattr(Sampler, "sample", early)


def not_renormalised(patch: pytest.MonkeyPatch, cell: Cell | Texts) -> None:
    """A later child in a tree is verified against a distribution without its siblings that does not add up to 1."""

    def gaps(q_L: Floats, drawn_W: Ints) -> Floats:
        q_WL = np.repeat(q_L[None], len(drawn_W), 0)
        for place, drawn in enumerate(drawn_W.tolist()):
            q_WL[place + 1 :, drawn] = 0.0
        return q_WL

    for module in [module for name, module in sys.modules.items() if name.startswith("workers.")]:
        if hasattr(module, "sibling_distributions"):
            patch.setattr(module, "sibling_distributions", gaps)


BUGS = (
    Bug(
        "accepts 2 % too often, coupled",
        too_lenient_coupled,
        Cell("coupled", pair="one-hot draft", shape=Shape(1)),
        12_000,
    ),
    Bug("accepts 2 % too often", too_lenient, Cell("standard", pair="one-hot draft", shape=Shape(1)), 9_000),
    Bug("resamples from p", resampling_from_p, Cell("standard", pair="unrelated", shape=Shape(1)), 3_000),
    Bug("shares noise under p/q", shared_noise, Cell("standard", pair="unrelated", shape=Shape(1))),
    Bug("bonus from q, coupled", bonus_from_q, Cell("coupled", pair="unrelated", shape=Shape(1)), 3_000),
    Bug("bonus from q", bonus_from_q, Cell("standard", pair="unrelated", shape=Shape(1)), 3_000),
    Bug("bonus from q, block", bonus_from_q, Cell("block", pair="unrelated", shape=Shape(1)), 3_000),
    Bug("penalties one token late, coupled", penalties_late, Texts("coupled", Shape(3), "penalties"), 3_000),
    Bug("penalties one token late", penalties_late, Texts("standard", Shape(3), "penalties"), 2_000),
    Bug("position key off by one", off_by_one, Cell("coupled", pair="near"), 3_000),
    Bug("children not renormalised", not_renormalised, Cell("standard", pair="peaked draft", shape=TREE), 3_000),
)
