"""Sampling of draft tokens for the rules of rejection sampling, which verify tokens by p/q.

These rules need draft tokens that were sampled from known distributions (`workers.verification.draft_probs`), with
noise that is independent of the target's. The shape of a tree must not depend on the sampled tokens, so its nodes are
scored by their ranks alone. Under the rule "coupled" the draft worker uses the target's sampler, noise included.
"""

import math
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch

from proposers.shared.static_tree import FIRST_RATE
from protos.config.engine import MAX_SPECULATIVE_TOKENS, SpeculativeConfig
from protos.draft import Draft
from protos.validation import warn_once
from workers.sampling.noise import DRAFT, path_keys, row_keys, stream_seeds
from workers.sampling.sample import MIN_TEMPERATURE, Ints, top_distribution, without_replacement
from workers.sampling.sampler import Sampler
from workers.verification.draft_probs import DRAFT_PROBS_SIZE, DraftProbs, children_by_parent

Path = tuple[int, ...]
SCORES_BY_RANK = tuple(math.log(FIRST_RATE) - 2 * math.log(rank + 1) for rank in range(MAX_SPECULATIVE_TOKENS))
"""A child's score depends on its rank alone, as in `proposers.shared.static_tree.rate`."""


class DraftPositions(NamedTuple):
    """N positions for which draft tokens are sampled.

    Attributes:
        slots_N: int64.
        index_N: int64, position in prompt + output of the draft token.
        paths_ND: int64, the D draft tokens before it; None where the proposer does not pass them.
    """

    slots_N: Ints
    index_N: Ints
    paths_ND: Ints | None

    def at(self, rows: Ints) -> "DraftPositions":
        """Return some of the positions."""
        paths_ND = None if self.paths_ND is None else self.paths_ND[rows]
        return DraftPositions(self.slots_N[rows], self.index_N[rows], paths_ND)


class DraftSampler:
    """Samples draft tokens from short distributions, with noise of their own, and stores the distributions.

    Greedy rows take the most likely tokens, and so do all rows with *samples* False.

    Args:
        sampler: has the requests' parameters.
        samples: whether rows with a temperature are sampled.
    """

    def __init__(self, sampler: Sampler, *, samples: bool) -> None:
        self._sampler, self.samples = sampler, samples
        self.begin()

    def begin(self) -> None:
        """Discard the distributions of the previous round."""
        self._batches: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._places: dict[tuple[int, Path], tuple[int, int]] = {}
        self._on_host: list[DraftProbs] = []

    def sample(self, logits_NV: torch.Tensor, positions: DraftPositions) -> torch.Tensor:
        """Return a draft token for each position, int64 `[N]`, from logits over the target's vocabulary.

        Penalties and other logits processors count the draft tokens before it.
        """
        processed_NV = self._sampler.processed(logits_NV, positions.slots_N, positions.index_N)
        return self.candidates(processed_NV, positions, 1)[0][:, 0]

    def candidates(
        self, logits_NV: torch.Tensor, positions: DraftPositions, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return *width* draft tokens for each position, best first, int64 `[N, W]`, and their scores, float32.

        Sampled ones are in the order in which they were sampled, and scored by their rank.
        """
        ids_NW = logits_NV.topk(width, 1).indices
        scores_NW = logits_NV.log_softmax(1).gather(1, ids_NW)
        is_sampled_N = self.samples & (self._sampler.limits(positions.slots_N).temperature >= MIN_TEMPERATURE)
        if is_sampled_N.any():
            rows = np.flatnonzero(is_sampled_N)
            at = torch.from_numpy(rows).to(logits_NV.device)
            ids_NW[at] = self._sample(logits_NV[at], positions.at(rows), width)
            scores_NW[at] = torch.tensor(SCORES_BY_RANK[:width], device=logits_NV.device)
        return ids_NW, scores_NW

    def draft_probs(self, slots: Seq[int], drafts: Seq[Draft]) -> dict[int, DraftProbs]:
        """Return the distributions that drafts of this round were sampled from, by slot, where they are known."""
        if not self.samples:
            return {}
        found = {slot: self._probs_of(slot, draft) for slot, draft in zip(slots, drafts, strict=True)}
        return {slot: probs for slot, probs in found.items() if probs is not None}

    def _probs_of(self, slot: int, draft: Draft) -> DraftProbs | None:
        places = [self._places.get((slot, path)) for path in _inner_paths(draft)]
        found = [place for place in places if place is not None]
        if not places or len(found) < len(places):
            return None
        self._on_host += [
            DraftProbs(ids_NL.cpu().numpy(), q_NL.cpu().numpy()) for ids_NL, q_NL in self._batches[len(self._on_host) :]
        ]
        return DraftProbs(
            np.stack([self._on_host[batch].ids_ML[n] for batch, n in found]),
            np.stack([self._on_host[batch].q_ML[n] for batch, n in found]),
        )

    def _sample(self, logits_NV: torch.Tensor, positions: DraftPositions, width: int) -> torch.Tensor:
        slots_N, index_N, paths_ND = positions
        seeds_N = stream_seeds(self._sampler.seeds(slots_N), DRAFT, self._sampler.slots.known_len[slots_N])
        keys_N = row_keys(seeds_N, index_N)
        ids_NL, q_NL = top_distribution(logits_NV, self._sampler.limits(slots_N), DRAFT_PROBS_SIZE)
        if paths_ND is None:
            warn_once(
                "the proposer does not pass the tokens before its candidates (`paths` of DraftRunner.candidates); "
                "this acceptance rule needs them, and accepts no tokens of its trees"
            )
        else:
            keys_N = path_keys(keys_N, paths_ND)
            for n, (slot, path) in enumerate(zip(slots_N.tolist(), paths_ND.tolist(), strict=True)):
                self._places[slot, tuple(path)] = len(self._batches), n
            self._batches.append((ids_NL, q_NL))
        return without_replacement(ids_NL, q_NL, torch.from_numpy(keys_N).to(logits_NV.device), width)


def _inner_paths(draft: Draft) -> list[Path]:
    """Return the tokens that lead to each node with children, in the order of `children_by_parent`."""
    paths: dict[int, Path] = {-1: ()}
    for node, (parent, token) in enumerate(zip(draft.node_parents(), draft.tokens, strict=True)):
        paths[node] = (*paths[parent], token)
    return [paths[node] for node in children_by_parent(draft)]


def make_draft_sampler(speculative: SpeculativeConfig, sampler: Sampler) -> DraftSampler | None:
    """Return the draft sampler for the acceptance rule of *speculative*; None where the target's sampler is used."""
    if speculative.rejection_sample_method in ("standard", "block"):
        return DraftSampler(sampler, samples=speculative.samples_drafts)
    return None
