"""A draft that is fed the target's features may be late, and some may be lost: it sees less then, and nothing wrong."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.draft import DraftRow
from protos.messages import NewSequence, RoundPlan, Row, Sampling
from tests.support.models.dense_runner import NAME as DENSE
from tests.support.models.dense_runner import DenseRunner, Text
from tests.support.models.paged_worker import BLOCK
from tests.workers.draft.test_draft_runner import Asks, H, K, Small, V
from workers.attention.backend import NAME as PAGED
from workers.draft.worker import DraftWorker
from workers.features import Features
from workers.model.module_runner import LoadedModule, ModuleRunner
from workers.sampling.sampler import Sampler
from workers.slots import SlotTable

PROMPT, LONGEST = 5, 48
TEXT = torch.randint(V, (LONGEST,), generator=torch.Generator().manual_seed(1)).tolist()
FEATURES = torch.randn(LONGEST, H, generator=torch.Generator().manual_seed(2))
MODULES = {name: Small(name, 1) for name in (PAGED, DENSE)}
ROWS, SLOT, GENERATION = [DraftRow(0, K)], 0, 1


class Pair:
    """A target of which only the pace counts, and a draft that takes plans and features when it comes to it."""

    def __init__(self) -> None:
        self.plans = [PROMPT]  # known tokens
        self.num_taken = 0
        self.mail: list[tuple[int, int]] = []  # features: the first position, and the one after the last
        slots = SlotTable(1, LONGEST, BLOCK, K)
        forward = ModuleRunner(
            LoadedModule(MODULES[PAGED], torch.float32, torch.float32, torch.device("cpu")), slots, 40, BLOCK
        )
        self.worker = DraftWorker(forward, slots, Sampler(slots, V), 100, needs="all", shift=1)
        blocks = list(range(-(-(LONGEST + K) // BLOCK)))
        new = NewSequence(SLOT, TEXT[:PROMPT], PROMPT, Sampling(0, 0.0), GENERATION)
        row = Row(SLOT, 0, PROMPT, PROMPT, new_block_ids=blocks, new_block_versions=[1] * len(blocks))
        slots.apply(RoundPlan(0, [row], [new]))

    def score(self, count: int, *, arrives: bool) -> None:
        """The target finds *count* tokens; the features of what it was fed are sent, or lost."""
        known = self.plans[-1]
        if arrives:
            self.mail.append((known - 1 if len(self.plans) > 1 else 0, known - 1 + count))
        self.plans.append(known + count)

    def draft(self, lag: int, reads: int) -> bool:
        """Take the plans but for the newest *lag* ones, then some mail, and draft; whether that can be done."""
        taken = len(self.plans) - lag
        if taken <= self.num_taken:
            return False
        before, known = self.plans[max(0, self.num_taken - 1)], self.plans[taken - 1]
        self.num_taken = taken
        row = Row(SLOT, known - 1, 1, known, K, new_token_ids=TEXT[before:known])
        self.worker.slots.apply(RoundPlan(1, [row]))
        self.read(reads)
        asks = Asks(self.worker, lambda runner: runner.catch_up(ROWS))
        asks.found = None
        self.worker.propose_at_once(asks, [SLOT], ROWS)
        if asks.found is not None:
            torch.testing.assert_close(asks.found, self.by_whole_text(known), atol=1e-4, rtol=1e-4)
        return asks.found is not None

    def idle(self, reads: int) -> None:
        """Read some mail, and catch up a little."""
        self.read(reads)
        self.worker.catch_up_some(3)

    def read(self, count: int) -> None:
        """Take in what came first."""
        for first, end in self.mail[:count]:
            table = np.array([(SLOT, GENERATION, first, end - first)], np.int64)
            self.worker.receive(Features(table, FEATURES[first:end]))
        del self.mail[:count]

    def by_whole_text(self, known: int) -> torch.Tensor:
        """Return the output after the known tokens, from all entries that the draft attends to."""
        lowest_R = self.worker.cache.lowest(np.array([SLOT]))
        first = 0 if lowest_R is None else int(lowest_R[0])
        text = Text(TEXT[first:known], FEATURES[first : known - 1])
        return DenseRunner(MODULES[DENSE], [text], torch.zeros(1, K + 1, V)).catch_up(ROWS)


SCORE = st.tuples(st.just("score"), st.integers(1, 3), st.booleans())
DRAFT = st.tuples(st.just("draft"), st.integers(0, 1), st.integers(0, 4))
IDLE = st.tuples(st.just("idle"), st.integers(0, 2), st.just(0))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(SCORE, DRAFT, DRAFT, IDLE), min_size=4, max_size=14))
def test_drafts_are_of_what_is_there(steps: list[tuple[str, int, int]]) -> None:
    pair = Pair()
    with torch.inference_mode():
        for what, count, more in steps:
            if what == "score":
                pair.score(count, arrives=bool(more))
            elif what == "draft":
                pair.draft(count, more)
            else:
                pair.idle(count)


def test_features_ahead_of_the_plan_after_a_gap() -> None:
    """They begin where the plan's last entry would: it cannot be made, and no later round may try."""
    pair = Pair()
    with torch.inference_mode():
        pair.score(1, arrives=True)
        assert pair.draft(0, 1)
        pair.score(2, arrives=False)
        pair.score(1, arrives=True)
        assert not pair.draft(1, 1)
        assert pair.draft(0, 0)
        for _ in range(2):
            pair.score(1, arrives=True)
            assert pair.draft(0, 1)
    assert pair.worker.slots.known_len[SLOT] == pair.plans[-1]
