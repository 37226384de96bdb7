"""Logits processors: masks, bias and penalties of requests, applied before temperature, in vLLM's order.

Allowed ids, bad words, minimum length, logit bias, then repetition, presence and frequency penalties. Repetition
counts prompt and output, the other penalties and bad words the output only. "Output" includes the draft
tokens before the position: if the position's token is emitted, they were accepted.
"""

import functools
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from protos.messages import Sampling
from workers.sampling.sample import Penalties
from workers.slots import SlotTable, has_additions, has_penalties

Ints = npt.NDArray[np.int64]
Counts = npt.NDArray[np.float32]


@dataclass(frozen=True)
class _Additions:
    """One request's masks and bias, as ids and what is added to their logits; unknown ids are left out."""

    ids: Ints
    values: Counts
    stop_ids: Ints
    min_tokens: int
    phrases: tuple[tuple[int, ...], ...]
    others_V: torch.Tensor | None  # 0 for allowed ids, -inf for others; added, so that NaN stays NaN

    @classmethod
    def of(cls, sampling: Sampling, vocab: int, device: torch.device) -> "_Additions":
        bias = {i: value for i, value in (sampling.logit_bias or {}).items() if i < vocab}
        banned = [word[0] for word in sampling.bad_words if len(word) == 1 and word[0] < vocab]
        values = [*bias.values(), *(-np.inf for _ in banned)]
        return cls(
            np.array([*bias, *banned], np.int64),
            np.array(values, np.float32),
            np.array([i for i in sampling.stop_ids if i < vocab], np.int64),
            sampling.min_tokens,
            tuple(word for word in sampling.bad_words if len(word) > 1 and word[-1] < vocab),
            _mask(sampling.allowed_ids, vocab, device),
        )

    def masked_now(self, output: Ints) -> Ints:
        """Return the ids masked because of the *output* so far: its length, and its end, which begins bad words."""
        early = self.stop_ids if len(output) < self.min_tokens else self.stop_ids[:0]
        ends = [word[-1] for word in self.phrases if _ends_with(output, word[:-1])]
        return np.concatenate((early, np.array(ends, np.int64))) if ends else early


@functools.lru_cache(maxsize=8)  # the samples of a request have the same ids
def _mask(allowed: bytes | None, vocab: int, device: torch.device) -> torch.Tensor | None:
    if allowed is None:
        return None
    ids = np.flatnonzero(np.unpackbits(np.frombuffer(allowed, np.uint8), bitorder="little"))
    mask_V = torch.full((vocab,), -torch.inf)
    mask_V[torch.from_numpy(ids[ids < vocab])] = 0.0
    return mask_V.to(device)


def _ends_with(output: Ints, prefix: tuple[int, ...]) -> bool:
    return len(output) >= len(prefix) and output[len(output) - len(prefix) :].tolist() == list(prefix)


class LogitsProcessors:
    """Applies each row's processors; caches by slot what does not change from step to step.

    Args:
        slots: owned by the worker; read only.
        vocab: number of columns of the logits given.
        device: of the logits.

    Attributes:
        penalties: of the sequence in each slot.
        has_additions_S: whether the sequence in a slot has masks or a bias.
    """

    def __init__(self, slots: SlotTable, vocab: int, device: torch.device) -> None:
        self._slots, self._vocab, self._device = slots, vocab, device
        num_slots = len(slots.generation)
        off_S = np.zeros(num_slots, np.float32)
        self.penalties = Penalties(off_S + 1.0, off_S.copy(), off_S.copy())
        self.has_additions_S = np.zeros(num_slots, np.bool_)
        self._additions: dict[int, _Additions] = {}
        self._counts: dict[int, _Counts] = {}

    def join(self, slot: int) -> None:
        """Drop the state of the previous sequence in *slot*, and prepare for the present one."""
        self._additions.pop(slot, None)
        self._counts.pop(slot, None)
        sampling = self._slots.sampling[slot]
        self.penalties.repetition[slot] = sampling.repetition_penalty
        self.penalties.presence[slot] = sampling.presence_penalty
        self.penalties.frequency[slot] = sampling.frequency_penalty
        self.has_additions_S[slot] = has_additions(sampling)
        if self.has_additions_S[slot]:
            self._additions[slot] = _Additions.of(sampling, self._vocab, self._device)
        if has_penalties(sampling):
            self._counts[slot] = _Counts(int(self._slots.prompt_len[slot]), self._vocab)

    def apply_(self, logits_NV: torch.Tensor, slots_N: Ints, index_N: Ints) -> None:
        """Process the logits of position `index_N[r]` of `slots_N[r]` in place."""
        self._apply_additions_(logits_NV, slots_N, index_N)
        self._apply_penalties_(logits_NV, slots_N, index_N)

    def _apply_additions_(self, logits_NV: torch.Tensor, slots_N: Ints, index_N: Ints) -> None:
        changed = _Elements()
        values: list[Counts] = []
        for row, (slot, index) in enumerate(zip(slots_N.tolist(), index_N.tolist(), strict=True)):
            additions = self._additions.get(slot)
            if additions is None:
                continue
            if additions.others_V is not None:
                logits_NV[row] += additions.others_V
            masked = additions.masked_now(self._slots.tokens[slot, self._slots.prompt_len[slot] : index])
            changed.append(row, additions.ids)
            values.append(additions.values)
            if len(masked):
                changed.append(row, masked)
                values.append(np.full(len(masked), -np.inf, np.float32))
        if values:
            added = torch.from_numpy(np.concatenate(values)).to(self._device)
            logits_NV.index_put_(changed.on(self._device), added, accumulate=True)

    def _apply_penalties_(self, logits_NV: torch.Tensor, slots_N: Ints, index_N: Ints) -> None:
        seen = _Elements()
        counts: list[Counts] = []
        penalised: list[int] = []
        for row, (slot, index) in enumerate(zip(slots_N.tolist(), index_N.tolist(), strict=True)):
            counter = self._counts.get(slot)
            if counter is not None:
                ids, count = counter.before(index, self._slots.tokens[slot], int(self._slots.known_len[slot]))
                seen.append(row, ids)
                counts.append(count)
                penalised.append(slot)
        if counts:
            penalties = self.penalties.at(np.repeat(penalised, seen.lengths))
            where = seen.on(self._device)
            parts = (np.concatenate(counts), penalties.repetition, penalties.presence, penalties.frequency)
            logits_NV[where] = _penalised(
                logits_NV[where], *(torch.from_numpy(part).to(self._device) for part in parts)
            )


def _penalised(
    logits_M: torch.Tensor,
    counts_M: torch.Tensor,
    repetition_M: torch.Tensor,
    presence_M: torch.Tensor,
    frequency_M: torch.Tensor,
) -> torch.Tensor:
    """Return the logits of tokens that occurred, lowered by their repetition, presence and frequency penalties."""
    logits_M = logits_M * torch.where(logits_M > 0, 1.0 / repetition_M, repetition_M)
    return logits_M - frequency_M * counts_M - presence_M * (counts_M > 0)


@dataclass
class _Elements:
    """Single elements of a matrix, gathered row by row."""

    rows: list[int] = field(default_factory=list)
    ids: list[Ints] = field(default_factory=list)

    def append(self, row: int, ids: Ints) -> None:
        self.rows.append(row)
        self.ids.append(ids)

    @property
    def lengths(self) -> list[int]:
        return [len(ids) for ids in self.ids]

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        rows, ids = np.repeat(self.rows, self.lengths), np.concatenate(self.ids)
        return torch.from_numpy(rows).to(device), torch.from_numpy(ids).to(device)


class _Counts:
    """How often each token occurs in one sequence's output, and which ids occur at all, prompt included.

    Committed tokens are counted once; draft tokens are counted for one call only.
    """

    def __init__(self, prompt_len: int, vocab: int) -> None:
        self._prompt_len, self._vocab = prompt_len, vocab
        self._reset()

    def _reset(self) -> None:
        self._counted = 0
        self._ids: Ints = np.empty(0, np.int64)
        self._seen_V = np.zeros(self._vocab, np.bool_)
        self._output_V = np.zeros(self._vocab, np.float32)

    def before(self, index: int, tokens_L: Ints, known_len: int) -> tuple[Ints, Counts]:
        """Return the ids before *index*, draft tokens possibly twice, and each one's count in the output."""
        committed = min(index, known_len)
        if committed < self._counted:
            self._reset()
        if committed > self._counted:
            self._commit(tokens_L, committed)
        if index <= committed:
            return self._ids, self._output_V[self._ids]
        drafted = self._within(tokens_L[max(committed, self._prompt_len) : index])
        ids = np.concatenate((self._ids, drafted))
        np.add.at(self._output_V, drafted, 1.0)
        counts = self._output_V[ids]
        np.subtract.at(self._output_V, drafted, 1.0)
        return ids, counts

    def _commit(self, tokens_L: Ints, end: int) -> None:
        new = self._within(tokens_L[self._counted : end])
        output = self._within(tokens_L[max(self._counted, self._prompt_len) : end])
        self._counted = end
        np.add.at(self._output_V, output, 1.0)
        unseen = np.unique(new[~self._seen_V[new]])
        self._seen_V[unseen] = True
        self._ids = np.concatenate((self._ids, unseen))

    def _within(self, tokens: Ints) -> Ints:
        """Return the tokens for which the logits have a column."""
        return tokens[tokens < self._vocab]
