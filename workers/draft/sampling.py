"""How a draft worker chooses its guesses: by the target's noise, or by laws and noise of its own.

Under the rule "coupled" a draft says what the target would say if it thought like the draft. Rules that judge by p/q
want guesses that were drawn by a law that they are told, with noise that nobody else uses; then the shape of a tree
must not depend on what was drawn, so its nodes are ranked by their places alone.
"""

import logging
import math
from typing import NamedTuple, Protocol

import numpy as np
import torch

from proposers.shared.static_tree import FIRST_RATE
from protos.config.engine import MAX_SPECULATIVE_TOKENS, SpeculativeConfig
from protos.draft import Draft
from protos.validation import warn_once
from workers.sampling.noise import DRAFT, path_keys, row_keys, stream_seeds
from workers.sampling.sample import MIN_TEMPERATURE, Ints, top_distribution, without_replacement
from workers.sampling.sampler import Sampler
from workers.verification.draft_probs import DRAFT_PROBS_SIZE, DraftProbs, families

logger = logging.getLogger(__name__)

Path = tuple[int, ...]
BY_RANK = tuple(math.log(FIRST_RATE) - 2 * math.log(rank + 1) for rank in range(MAX_SPECULATIVE_TOKENS))
"""What a child scores by its rank, as in `proposers.shared.static_tree.rate`, and by nothing else."""


class Points(NamedTuple):
    """Where N guesses, or groups of guesses, are made.

    Attributes:
        slots_N: int64.
        index_N: int64, position in prompt + output of the tokens guessed.
        paths_ND: int64, the D drafted tokens before them; None where nobody said which.
    """

    slots_N: Ints
    index_N: Ints
    paths_ND: Ints | None


class DraftSampler(Protocol):
    """Chooses guesses by logits over the target's vocabulary, float32 `[N, V]`.

    `by_path` says that it has to know what was drafted before.
    """

    @property
    def by_path(self) -> bool:
        """See above."""
        ...

    def begin(self) -> None:
        """Forget the round before."""
        ...

    def one(self, logits_NV: torch.Tensor, points: Points) -> torch.Tensor:
        """Return a guess for each point, int64 `[N]`; -1 where there is none."""
        ...

    def several(self, logits_NV: torch.Tensor, points: Points, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return *width* guesses for each point, best first, int64 `[N, W]`, and their scores, float32 `[N, W]`."""
        ...

    def laws(self, slot: int, draft: Draft) -> DraftProbs | None:
        """Return what *draft* of this round was drawn from; None where it was not drawn, or that is not known."""
        ...


class CoupledNoise:
    """By the target's own pipeline and noise, for sample and match."""

    by_path = False

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def begin(self) -> None:
        """Nothing is remembered."""

    def one(self, logits_NV: torch.Tensor, points: Points) -> torch.Tensor:
        """See `DraftSampler`."""
        return self._sampler.sample(logits_NV, points.slots_N, points.index_N)

    def several(self, logits_NV: torch.Tensor, points: Points, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DraftSampler` and `Sampler.best`."""
        return self._sampler.candidates(logits_NV, points.slots_N, points.index_N, width)

    def laws(self, slot: int, draft: Draft) -> None:
        """It is the target that draws."""


class IndependentNoise:
    """By short laws (`workers.verification.draft_probs`) and a separate stream; the likeliest for greedy rows.

    Args:
        sampler: knows what the requests ask for.
        draws: whether rows with a temperature are drawn.
    """

    def __init__(self, sampler: Sampler, *, draws: bool) -> None:
        self._sampler, self._draws = sampler, draws
        self.begin()

    @property
    def by_path(self) -> bool:
        """See `DraftSampler`."""
        return self._draws

    def begin(self) -> None:
        """See `DraftSampler`."""
        self._batches: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._places: dict[tuple[int, Path], tuple[int, int]] = {}
        self._read: list[DraftProbs] = []

    def one(self, logits_NV: torch.Tensor, points: Points) -> torch.Tensor:
        """See `DraftSampler`. Penalties and the like count what was drafted before."""
        edited_NV = self._sampler.processed(logits_NV, points.slots_N, points.index_N)
        return self.several(edited_NV, points, 1)[0][:, 0]

    def several(self, logits_NV: torch.Tensor, points: Points, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DraftSampler`. What is drawn is in the order drawn, and scored by its rank."""
        ids_NW = logits_NV.topk(width, 1).indices
        scores_NW = logits_NV.log_softmax(1).gather(1, ids_NW)
        drawn_N = self._draws & (self._sampler.limits(points.slots_N).temperature >= MIN_TEMPERATURE)
        if drawn_N.any():
            part = np.flatnonzero(drawn_N)
            at = torch.from_numpy(part).to(logits_NV.device)
            ids_NW[at] = self._draw(logits_NV[at], _some(points, part), width)
            scores_NW[at] = torch.tensor(BY_RANK[:width], device=logits_NV.device)
        return ids_NW, scores_NW

    def laws(self, slot: int, draft: Draft) -> DraftProbs | None:
        """See `DraftSampler`."""
        places = [self._places.get((slot, path)) for path in _inner_paths(draft)]
        found = [place for place in places if place is not None]
        if not places or len(found) < len(places):
            return None
        self._read += [
            DraftProbs(ids_NL.cpu().numpy(), q_NL.cpu().numpy()) for ids_NL, q_NL in self._batches[len(self._read) :]
        ]
        return DraftProbs(
            np.stack([self._read[batch].ids_ML[n] for batch, n in found]),
            np.stack([self._read[batch].q_ML[n] for batch, n in found]),
        )

    def _draw(self, logits_NV: torch.Tensor, points: Points, width: int) -> torch.Tensor:
        slots_N, index_N, paths_ND = points
        seeds_N = stream_seeds(self._sampler.seeds(slots_N), DRAFT, self._sampler.slots.known_len[slots_N])
        keys_N = row_keys(seeds_N, index_N)
        ids_NL, q_NL = top_distribution(logits_NV, self._sampler.limits(slots_N), DRAFT_PROBS_SIZE)
        if paths_ND is None:
            warn_once(
                "a proposer does not say behind which tokens it makes candidates (paths of "
                "DraftRunner.candidates); under this rule of acceptance its trees are drafted in vain"
            )
        else:
            keys_N = path_keys(keys_N, paths_ND)
            for n, (slot, path) in enumerate(zip(slots_N.tolist(), paths_ND.tolist(), strict=True)):
                self._places[slot, tuple(path)] = len(self._batches), n
            self._batches.append((ids_NL, q_NL))
        return without_replacement(ids_NL, q_NL, torch.from_numpy(keys_N).to(logits_NV.device), width)


def _some(points: Points, part: Ints) -> Points:
    paths_ND = points.paths_ND
    return Points(points.slots_N[part], points.index_N[part], None if paths_ND is None else paths_ND[part])


def _inner_paths(draft: Draft) -> list[Path]:
    """Return the tokens that lead to each node with children, in the order of `families`."""
    paths: dict[int, Path] = {-1: ()}
    for node, (parent, token) in enumerate(zip(draft.node_parents(), draft.tokens, strict=True)):
        paths[node] = (*paths[parent], token)
    return [paths[node] for node in families(draft)]


def drawing_for(speculative: SpeculativeConfig, sampler: Sampler) -> DraftSampler:
    """Return how the draft of *speculative* chooses its guesses: as the rule that judges them wants it."""
    if speculative.rejection_sample_method in ("standard", "block"):
        return IndependentNoise(sampler, draws=speculative.samples_drafts)
    return CoupledNoise(sampler)
