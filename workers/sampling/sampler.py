"""The sampling pipeline of every token, of target and draft, with and without speculation.

y = argmax over v of (log p(v) + g(seed, index, v)) at temperature > 0, argmax of log p at 0, where p is what logits
processors (`workers.sampling.logits_processors`), temperature and limits (`workers.sampling.sample`) make of the
logits, and g is keyed Gumbel noise (`workers.sampling.noise`). A token depends on the row's logits, its slot's tokens
before the index, and the request: on nothing else in the batch.
"""

import copy
import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from protos.draft import Draft
from protos.messages import NewSequence, Row, Sampling
from workers.native.build import KernelUnavailableError
from workers.sampling.logits_processors import LogitsProcessors
from workers.sampling.noise import row_keys
from workers.sampling.sample import (
    MIN_TEMPERATURE,
    Ints,
    Penalties,
    SamplingLimits,
    candidates,
    distribution,
    greedy,
    likely_candidates,
    parts_of,
    sample,
)
from workers.sampling.sample_native import NativeSampler
from workers.slots import SlotTable, changes_logits

if TYPE_CHECKING:
    from workers.sampling.grammar_masks import GrammarMasks

logger = logging.getLogger(__name__)

SampledRows = tuple[torch.Tensor, Ints, Ints]  # logits, slots and index of N rows
SampleFunction = Callable[[torch.Tensor, Ints, Ints], torch.Tensor]
Flags = npt.NDArray[np.bool_]
BLOCK_ELEMENTS = 1 << 15  # logits processed at a time on the host, so that they stay in the processor's cache
NOT_A_NUMBER = "the model's logits for this sequence are not numbers (NaN)"
NOTHING_LEFT = (
    "structured_outputs: no token is left to choose: the grammar forbids all that allowed_token_ids, bad_words, "
    "logit_bias and min_tokens allow"
)


class Sampler:
    """Samples tokens by the parameters in a worker's slot table.

    Args:
        slots: owned by the worker; read only.
        vocab_size: number of ids that may be sampled; logits may have more columns (padding), which are ignored.
        device: of the logits.
    """

    def __init__(self, slots: SlotTable, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.slots, self.vocab_size = slots, vocab_size
        self._on_host = torch.device(device).type == "cpu"
        self._processors = LogitsProcessors(slots, vocab_size, torch.device(device))
        self._masks: GrammarMasks | None = None
        num_slots = len(slots.generation)
        self._generation_S: Ints = np.full(num_slots, -1, np.int64)
        self._seed_S = np.zeros(num_slots, np.uint64)
        self._limits_S = SamplingLimits(
            np.ones(num_slots, np.float32), np.zeros(num_slots, np.int64), np.ones(num_slots), np.zeros(num_slots)
        )
        self._has_processors_S = np.zeros(num_slots, np.bool_)
        self._has_logprobs_S = np.zeros(num_slots, np.bool_)
        self._sample: SampleFunction = self._native() or self._sample_in_torch

    def with_grammars(self, masks: "GrammarMasks") -> "Sampler":
        """Return a sampler that never samples what a grammar forbids; it shares this one's state of the slots."""
        other = copy.copy(self)
        other._masks = masks
        return other

    def expect(self, new: Seq[NewSequence]) -> None:
        """Begin to compile the grammars of new sequences, which are in the slots already."""
        if self._masks is not None and any(each.sampling.grammar is not None for each in new):
            self._masks.grammars.expect(new)

    def begin(self, rows: Seq[Row], drafts: Seq[Draft]) -> None:
        """Begin to compute the grammar masks of a round that is about to be scored; *drafts* are in the slots."""
        if self._masks is not None and any(self.slots.constrained[row.slot] for row in rows):
            self._masks.grammars.begin(rows, drafts)

    def skips(self, slot: int) -> bool:
        """Whether the row of *slot* must skip this round, because its grammar mask was not ready."""
        return self._masks is not None and bool(self.slots.constrained[slot]) and self._masks.grammars.skips(slot)

    def prune(self, rows: Seq[Row], drafts: Seq[Draft]) -> Seq[Draft]:
        """Return *drafts* without tokens that the grammars forbid, which could never be accepted."""
        constrained_S = self.slots.constrained
        if self._masks is None or not any(
            draft.tokens and constrained_S[row.slot] for row, draft in zip(rows, drafts, strict=True)
        ):
            return drafts
        return self._masks.grammars.prune(rows, drafts)

    def sample(self, logits_NV: torch.Tensor, slots_N: Ints, index_N: Ints) -> torch.Tensor:
        """Return the sampled ids, int64 `[N]` on the logits' device; -1 for rows that have no token left.

        Args:
            logits_NV: float32, raw; not changed.
            slots_N: int64, the slot of each row.
            index_N: int64, the position in prompt + output of the token being sampled. The tokens before it,
                drafted ones included, are in `slots.tokens[slot, :index]`.
        """
        if not len(slots_N):
            return torch.empty(0, dtype=torch.int64, device=logits_NV.device)
        self._refresh(slots_N)
        batch = (self._masked(logits_NV, slots_N, index_N), slots_N, index_N)
        return by_part(self._has_processors_S[slots_N], self._process_and_sample, self._sample, batch)

    def distribution(self, logits_NV: torch.Tensor, slots_N: Ints, index_N: Ints) -> torch.Tensor:
        """Return the distribution of `sample`, float64 `[N, V]` on the logits' device; arguments as there.

        A greedy row's is a point mass; rows that have no token left are zeros.
        """
        logits_NV = self.processed(logits_NV, slots_N, index_N)
        limits = self._limits_S.at(slots_N)
        is_random_N, free_N = limits.temperature >= MIN_TEMPERATURE, limits.are_off
        if is_random_N.all() and (free_N.all() or not free_N.any()):
            return distribution(logits_NV, limits)
        p_NV = torch.zeros(logits_NV.shape, dtype=torch.float64, device=logits_NV.device)
        for part in (np.flatnonzero(is_random_N & free_N), np.flatnonzero(is_random_N & ~free_N)):
            if len(part):
                at = torch.from_numpy(part).to(logits_NV.device)
                p_NV[at] = distribution(logits_NV[at], limits.at(part))
        if not is_random_N.all():
            at = torch.from_numpy(np.flatnonzero(~is_random_N)).to(logits_NV.device)
            ids_M = greedy(logits_NV[at])
            p_NV[at, ids_M.clamp_min(0)] = (ids_M >= 0).double()
        return p_NV

    def processed(self, logits_NV: torch.Tensor, slots_N: Ints, index_N: Ints) -> torch.Tensor:
        """Return the logits after grammar masks and processors, `[N, vocab_size]`; arguments as for `sample`."""
        self._refresh(slots_N)
        logits_NV = self._masked(logits_NV, slots_N, index_N)
        if not self._has_processors_S[slots_N].any():
            return logits_NV
        processed_NV = logits_NV.clone()
        self._processors.apply_(processed_NV, slots_N, index_N)
        return processed_NV

    def seeds(self, slots_N: Ints) -> Ints:
        """Return the seeds of the sequences in some slots: the bits of uint64 as int64, `[N]`."""
        self._refresh(slots_N)
        return self._seed_S.view(np.int64)[slots_N]

    def limits(self, slots_N: Ints) -> SamplingLimits:
        """Return temperature, top-k, top-p and min-p of the sequences in some slots."""
        self._refresh(slots_N)
        return self._limits_S.at(slots_N)

    def penalties(self, slots_N: Ints) -> Penalties:
        """Return the penalties of the sequences in some slots."""
        self._refresh(slots_N)
        return self._processors.penalties.at(slots_N)

    def needs_host(self, slots_N: Ints, *, is_counted: bool) -> bool:
        """Whether a request of these slots has logits processors, a grammar, or wants log-probabilities.

        Penalties do not need the host where tokens are counted on the device.
        """
        self._refresh(slots_N)
        processors_S = self._processors.has_additions_S if is_counted else self._has_processors_S
        flags = (processors_S, self._has_logprobs_S, self.slots.constrained)
        return any(bool(flag_S[slots_N].any()) for flag_S in flags)

    def candidates(
        self, logits_NV: torch.Tensor, slots_N: Ints, index_N: Ints, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the *width* best candidates, best first, int64 `[N, W]`, and their log-probabilities.

        The first is what `sample` returns, but for logits processors and grammars, which are left out. Where fewer than
        *width* ids can be sampled, others follow. Rows with a temperature have the log-probabilities of
        `workers.sampling.sample.candidates`, given their noise; greedy ones those of their logits.
        """
        self._refresh(slots_N)
        logits_NV = logits_NV[:, : self.vocab_size]
        ids_NW, log_q_NW = likely_candidates(logits_NV, width)
        limits = self._limits_S.at(slots_N)
        is_random_N, free_N = limits.temperature >= MIN_TEMPERATURE, limits.are_off
        for part in (np.flatnonzero(is_random_N & free_N), np.flatnonzero(is_random_N & ~free_N)):
            if len(part):
                at = torch.from_numpy(part).to(logits_NV.device)
                keys = self._keys(slots_N[part], index_N[part]).to(logits_NV.device)
                ids_NW[at], log_q_NW[at] = candidates(logits_NV[at], keys, limits.at(part), width)
        return ids_NW, log_q_NW

    def failure_reason(self, slot: int, logits_MV: torch.Tensor) -> str:
        """Return why no token could be sampled for the sequence in *slot*, from the logits of its positions."""
        if self._masks is None or not self.slots.constrained[slot]:
            return NOT_A_NUMBER
        reason = self._masks.grammars.reason(slot)
        return reason or (NOT_A_NUMBER if bool(logits_MV.isnan().any()) else NOTHING_LEFT)

    def _masked(self, logits_NV: torch.Tensor, slots_N: Ints, index_N: Ints) -> torch.Tensor:
        logits_NV = logits_NV[:, : self.vocab_size]
        if self._masks is None or not self.slots.constrained[slots_N].any():
            return logits_NV
        return self._masks.apply(logits_NV, slots_N, index_N)

    def _refresh(self, slots_N: Ints) -> None:
        """Read the parameters of slots whose sequence has changed since they were last read."""
        changed_N = self._generation_S[slots_N] != self.slots.generation[slots_N]
        if changed_N.any():
            for slot in np.unique(slots_N[changed_N]).tolist():
                self._read(slot, self.slots.sampling[slot])

    def _read(self, slot: int, sampling: Sampling) -> None:
        self._generation_S[slot] = self.slots.generation[slot]
        self._seed_S[slot] = sampling.seed
        self._limits_S.temperature[slot] = sampling.temperature
        self._limits_S.top_k[slot] = sampling.top_k if sampling.top_k < self.vocab_size else 0
        self._limits_S.top_p[slot] = sampling.top_p
        self._limits_S.min_p[slot] = sampling.min_p
        if self._has_processors_S[slot] or changes_logits(sampling):
            self._processors.join(slot)
        self._has_processors_S[slot] = changes_logits(sampling)
        self._has_logprobs_S[slot] = sampling.logprobs is not None or sampling.prompt_logprobs is not None

    def _process_and_sample(self, logits_NV: torch.Tensor, slots_N: Ints, index_N: Ints) -> torch.Tensor:
        size = max(1, BLOCK_ELEMENTS // self.vocab_size) if self._on_host else len(slots_N)
        return torch.cat(
            [
                self._process_block(logits_NV[at], slots_N[at], index_N[at])
                for at in (slice(first, first + size) for first in range(0, len(slots_N), size))
            ]
        )

    def _process_block(self, logits_NV: torch.Tensor, slots_N: Ints, index_N: Ints) -> torch.Tensor:
        processed_NV = logits_NV.clone()
        self._processors.apply_(processed_NV, slots_N, index_N)
        return self._sample(processed_NV, slots_N, index_N)

    def _native(self) -> SampleFunction | None:
        if not self._on_host:
            return None
        try:
            return NativeSampler(self._seed_S, self._limits_S).sample
        except KernelUnavailableError as error:
            logger.info("sampling runs in plain torch: %s", error)
            return None

    def _sample_in_torch(self, logits_NV: torch.Tensor, slots_N: Ints, index_N: Ints) -> torch.Tensor:
        is_random_N = self._limits_S.temperature[slots_N] >= MIN_TEMPERATURE
        return by_part(is_random_N, self._sample_with_noise, _greedy, (logits_NV, slots_N, index_N))

    def _sample_with_noise(self, logits_NV: torch.Tensor, slots_N: Ints, index_N: Ints) -> torch.Tensor:
        """Sample rows without limits separately: only the others need their vocabulary sorted."""
        free_N = self._limits_S.at(slots_N).are_off
        return by_part(free_N, self._sample_alike, self._sample_alike, (logits_NV, slots_N, index_N))

    def _sample_alike(self, logits_NV: torch.Tensor, slots_N: Ints, index_N: Ints) -> torch.Tensor:
        parts = [self._sample_part(logits_NV[at], slots_N[at], index_N[at]) for at in parts_of(logits_NV)]
        return torch.cat(parts)

    def _sample_part(self, logits_NV: torch.Tensor, slots_N: Ints, index_N: Ints) -> torch.Tensor:
        keys_N = self._keys(slots_N, index_N).to(logits_NV.device)
        return sample(logits_NV, keys_N, self._limits_S.at(slots_N))

    def _keys(self, slots_N: Ints, index_N: Ints) -> torch.Tensor:
        return torch.from_numpy(row_keys(self._seed_S.view(np.int64)[slots_N], index_N))


def _greedy(logits_NV: torch.Tensor, _slots_N: Ints, _index_N: Ints) -> torch.Tensor:
    return greedy(logits_NV)


def by_part(
    first_N: Flags, sample_first: SampleFunction, sample_rest: SampleFunction, batch: SampledRows
) -> torch.Tensor:
    """Sample rows marked in `first_N` with one function, the rest with the other; copy logits if both have rows."""
    num_first = np.count_nonzero(first_N)
    if num_first in {0, len(first_N)}:
        return sample_first(*batch) if num_first else sample_rest(*batch)
    logits_NV, slots_N, index_N = batch
    ids_N = torch.empty(len(slots_N), dtype=torch.int64, device=logits_NV.device)
    for part, function in ((np.flatnonzero(first_N), sample_first), (np.flatnonzero(~first_N), sample_rest)):
        at = torch.from_numpy(part).to(logits_NV.device)
        ids_N[at] = function(logits_NV[at], slots_N[part], index_N[part])
    return ids_N


def fit_vocab(logits_RV: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Cut or pad a draft's logits to the target's vocabulary: ids that either lacks are never proposed."""
    missing = vocab_size - logits_RV.shape[1]
    return F.pad(logits_RV, (0, missing), value=-torch.inf) if missing > 0 else logits_RV[:, :vocab_size]
