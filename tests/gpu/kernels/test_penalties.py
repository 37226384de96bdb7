"""The penalty kernels, interpreted, against `workers.sampling.logits_processors`: the same bits."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.messages import Sampling
from workers.gpu.kernels import penalties
from workers.gpu.token_counts import TokenCounts
from workers.sampling.logits_processors import LogitsProcessors
from workers.sampling.sample import Ints
from workers.slots import SlotTable

pytestmark = pytest.mark.usefixtures("one_thread")
VOCAB = 70
LENGTH = 40
QUERIES = 4


@dataclass(frozen=True)
class Case:
    """Rows with penalties, prompts and outputs, drafts of any shape, and logits.

    Attributes:
        seed: of tokens and logits.
        rows: repetition, presence and frequency penalty of each.
        room: new tokens of a row that graphs can count in a round.
    """

    seed: int
    rows: tuple[tuple[float, float, float], ...]
    room: int


cases = st.builds(
    Case,
    st.integers(0, 2**31),
    st.lists(
        st.tuples(
            st.sampled_from([1.0, 1.05, 0.7, 1.8]),
            st.sampled_from([0.0, 0.3, -1.1, 2.0]),
            st.sampled_from([0.0, 0.7, -0.2]),
        ),
        min_size=1,
        max_size=4,
    ).map(tuple),
    st.integers(1, 6),
)


class Sequences:
    """Sequences in slots that grow, counted on the host and by graphs."""

    def __init__(self, case: Case) -> None:
        self.dice, self._case = np.random.default_rng(case.seed), case
        self.slots = SlotTable(len(case.rows), LENGTH, 4)
        self.slots_R = self.dice.permutation(len(case.rows))
        self.processors = LogitsProcessors(self.slots, VOCAB, torch.device("cpu"))
        self.counts = TokenCounts(self.slots, VOCAB, torch.device("cpu"))
        for slot in self.slots_R:
            self.join(int(slot))

    def join(self, slot: int) -> None:
        """Let a sequence begin, as after preemption with some output, or without."""
        repetition, presence, frequency = self._case.rows[slot]
        prompt, known = sorted(self.dice.integers(1, LENGTH // 2, 2).tolist())
        self.slots.tokens[slot] = self.dice.integers(0, VOCAB + 3, self.slots.tokens.shape[1])  # some have no logit
        self.slots.known_len[slot], self.slots.prompt_len[slot] = known, prompt
        self.slots.generation[slot] += 1
        self.slots.sampling[slot] = Sampling(
            seed=0, repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency
        )
        self.processors.join(slot)

    def round(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of a round after the penalties of the host, and after those of the device."""
        rows = len(self.slots_R)
        logits_NV = torch.from_numpy(self.dice.normal(0, 3, (rows * QUERIES, VOCAB)).astype(np.float32))
        penalised = self.processors.penalties.at(self.slots_R)
        parents_RQ = np.array(
            [[0, *(int(self.dice.integers(0, q)) for q in range(1, QUERIES))] for _ in range(rows)], np.int64
        )
        drafts_RQ = self.dice.integers(0, VOCAB, (rows, QUERIES))
        uncounted_RC = np.empty((rows, self._case.room), np.int64)
        self.counts.write_uncounted(uncounted_RC, self.slots_R, penalised, follows=False)
        found = {
            "slots_R": torch.from_numpy(self.slots_R),
            "tokens_RQ": torch.from_numpy(drafts_RQ),
            "parents_RQ": torch.from_numpy(parents_RQ),
            "repetition_R": torch.from_numpy(penalised.repetition),
            "presence_R": torch.from_numpy(penalised.presence),
            "frequency_R": torch.from_numpy(penalised.frequency),
            "uncounted_RC": torch.from_numpy(uncounted_RC),
        }
        wanted_NV = logits_NV.clone()
        for row, slot in enumerate(self.slots_R.tolist()):
            for column in range(QUERIES):
                drafted = drafts_RQ[row, path(parents_RQ[row], column)]
                self._penalise_on_host(wanted_NV[row * QUERIES + column], slot, drafted)
        penalties.count_(self.counts.seen_SV, found)
        penalties.penalise_(logits_NV, self.counts.seen_SV, found, 0, QUERIES)
        return wanted_NV, logits_NV

    def _penalise_on_host(self, logits_V: torch.Tensor, slot: int, drafted: Ints) -> None:
        self.slots.write_draft(slot, drafted.tolist())
        index_1 = self.slots.known_len[[slot]] + len(drafted)
        self.processors.apply_(logits_V[None], np.array([slot]), index_1)

    def grow(self) -> None:
        """Add some tokens to sequences, or put others into their slots."""
        for slot in self.slots_R.tolist():
            if self.dice.random() < 0.2:
                self.join(slot)
            else:
                most = LENGTH - self.slots.known_len[slot]
                self.slots.known_len[slot] += min(int(self.dice.integers(0, 5)), most)


def path(parents_Q: Ints, column: int) -> list[int]:
    """Return the columns of draft tokens from the newest known token to *column*, which is the last."""
    found = list[int]()
    while column:
        found.append(column)
        column = int(parents_Q[column])
    return found[::-1]


@settings(max_examples=10, deadline=None)
@given(cases)
def test_penalties_are_those_of_the_host(case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(penalties, "BLOCK", 64)  # so that small vocabularies have several blocks
        sequences = Sequences(case)
        for _ in range(3):
            wanted_NV, found_NV = sequences.round()
            assert torch.equal(found_NV, wanted_NV)
            sequences.grow()
