"""Early stop by what was learnt: how often draft tokens of a confidence survived (threshold "auto").

A token survives if it is accepted after all before it were. The histogram of confidences corrects what the draft
believes, which is often too much or too little. A chain gets another token if that pays: if the product of the rates
of its tokens, times the mean rate for the token to come, is at least `least`. That is what a further draft token costs
in tokens, by the costs that the policy measures (`runtime.policy.stopping`).

A round decides by earlier rounds alone, and by the tokens drawn so far, as `workers.draft.early_stop` demands.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from workers.sampling.sample import Floats, Ints
from workers.slots import SlotTable

LOG_ODDS, BINS_PER_UNIT = 5, 2
"""The histogram covers log-odds of the confidence from -5 to 5; those beyond are in its first and last bin."""
PRIOR_TRIALS = 4.0
"""Weight of the confidence itself as the rate of its bin, in trials."""
MEMORY_TRIALS = 4000.0
"""When so many tokens were tried, half of what was seen is forgotten."""


class SurvivalRates:
    """How often tokens survived, by the bin of their confidence, and on average."""

    def __init__(self) -> None:
        edges = np.arange(-LOG_ODDS, LOG_ODDS + 0.25, 1 / BINS_PER_UNIT)
        middles = np.concatenate(([edges[0] - 0.5], (edges[1:] + edges[:-1]) / 2, [edges[-1] + 0.5]))
        self._edges = 1 / (1 + np.exp(-edges))
        self._prior_B: Floats = 1 / (1 + np.exp(-middles))
        self._tried_B: Floats = np.zeros(len(middles))
        self._survived_B: Floats = np.zeros(len(middles))
        self.refresh()

    def bins(self, confidence_R: Floats) -> Ints:
        """Return the bin of each confidence; the first one for NaN."""
        found: Ints = np.searchsorted(self._edges, np.nan_to_num(confidence_R), side="right")
        return found

    def add(self, bins: Seq[int], num_survived: int) -> None:
        """Add tokens that were tried, one after another, of which the first *num_survived* survived."""
        for place, bin_ in enumerate(bins):
            self._tried_B[bin_] += 1
            self._survived_B[bin_] += place < num_survived

    def refresh(self) -> None:
        """Estimate the rates again. `rate_B` is by bin, `mean` of all tokens that were tried."""
        if self._tried_B.sum() > MEMORY_TRIALS:
            self._tried_B *= 0.5
            self._survived_B *= 0.5
        self.rate_B: Floats = (self._survived_B + PRIOR_TRIALS * self._prior_B) / (self._tried_B + PRIOR_TRIALS)
        self.mean = float((self._survived_B.sum() + PRIOR_TRIALS) / (self._tried_B.sum() + PRIOR_TRIALS))


@dataclass
class _Drafted:
    """One row's draft tokens of a round, the bins of their confidences, and where they begin."""

    generation: int
    known: int
    tokens: list[int] = field(default_factory=list)
    bins: list[int] = field(default_factory=list)


class LearntStop:
    """Goes on while a further token pays: see `workers.draft.early_stop.StopRule`.

    Args:
        slots: the sequences, whose tokens show in the next round what was accepted.

    Attributes:
        least: the smallest probability to be accepted with which a draft token pays.
    """

    def __init__(self, slots: SlotTable) -> None:
        self.least = 0.0
        self.rates = SurvivalRates()
        self._slots = slots
        self._drafted: dict[int, _Drafted] = {}
        self._path_S: Floats = np.ones(len(slots.known_len))

    def begin(self) -> None:
        """Learn from the drafts of the round before."""
        for slot, draft in self._drafted.items():
            if self._slots.generation[slot] == draft.generation:
                self._learn(slot, draft)
        self._drafted.clear()
        self._path_S[:] = 1.0
        self.rates.refresh()

    def take(self, slots_R: Ints, ids_R: Ints, confidence_R: Floats) -> None:
        """Take the newest token of each row."""
        bins_R = self.rates.bins(confidence_R)
        self._path_S[slots_R] *= self.rates.rate_B[bins_R]
        for slot, token, bin_ in zip(slots_R.tolist(), ids_R.tolist(), bins_R.tolist(), strict=True):
            draft = self._drafted.get(slot)
            if draft is None:
                draft = _Drafted(int(self._slots.generation[slot]), int(self._slots.known_len[slot]))
                self._drafted[slot] = draft
            draft.tokens.append(token)
            draft.bins.append(bin_)

    def goes_on(self, slots: Seq[int]) -> list[bool]:
        """Return whether the chain of each slot should have another token."""
        found: list[bool] = (self._path_S[slots] * self.rates.mean >= self.least).tolist()
        return found

    def _learn(self, slot: int, draft: _Drafted) -> None:
        """Compare a draft with what was emitted. Of tokens after the newest one, nothing is known."""
        emitted = self._slots.tokens[slot, draft.known : self._slots.known_len[slot]].tolist()
        pairs = [*zip(draft.tokens, emitted, strict=False)]
        survived = next((place for place, (drafted, token) in enumerate(pairs) if drafted != token), len(pairs))
        self.rates.add(draft.bins[: min(survived + 1, len(pairs))], survived)
