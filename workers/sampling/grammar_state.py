"""What target rank 0 knows of the grammar of one sequence, and the limits on waiting for it."""

from dataclasses import dataclass, field

from protos.draft import Draft
from protos.messages import Grammar, Sampling
from workers.sampling.grammar_followers import Follower
from workers.sampling.matcher import Bits

TOO_SLOW = (
    "the grammar is too complex to follow here: it took more than {:g} s of a processor, or too much memory or time; "
    "make it simpler"
)

Tail = tuple[int, ...]


@dataclass(frozen=True)
class FollowLimits:
    """Limits on waiting for masks.

    Attributes:
        round_s: seconds that a round waits after its forward.
        patience_s: seconds that rounds wait for a sequence in all. Then it is waited for only where all rows of a round
            are such, and its process gives way to others.
        regained_s: patience that every mask gives back.
        draft_s: a sequence whose answer took longer gets no more drafts.
        budget_s: of a sequence, in seconds of a processor.
        longest_s: seconds that late answers of a sequence may take in all.
    """

    round_s: float = 0.05
    patience_s: float = 0.2
    regained_s: float = 0.002
    draft_s: float = 0.25
    budget_s: float = 5.0
    longest_s: float = 30.0


@dataclass
class SlotGrammar:
    """The grammar of the sequence in a slot.

    Attributes:
        slot, generation: of the sequence, as in `SlotTable`.
        number: of the sequence, never reused.
        sampling: its options.
        patience_s: how long rounds may still wait for it.
        follower: its process, if it has one.
        asked_at: when it was asked what it has not answered, else None.
        asked_draft: whether that was about draft tokens too.
        asked_len: number of output tokens that were committed then.
        settled: number of output tokens that are matched and committed.
        known_len: number of known tokens to which `masks` and `pruned` belong.
        masks: by the draft tokens after them.
        pruned: the round's draft without what is forbidden.
        prunes_drafts: False after a draft on which the matcher failed, or was slow.
        late_s: seconds that answers took for which a round did not wait.
        reason: why the sequence failed.
    """

    slot: int
    generation: int
    number: int
    sampling: Sampling
    patience_s: float
    follower: Follower | None = None
    asked_at: float | None = None
    asked_draft: bool = False
    asked_len: int = 0
    settled: int = 0
    known_len: int = 0
    masks: dict[Tail, Bits] = field(default_factory=dict)
    pruned: Draft | None = None
    prunes_drafts: bool = True
    late_s: float = 0.0
    reason: str | None = None

    @property
    def grammar(self) -> Grammar:
        """What the output must match."""
        assert self.sampling.grammar is not None, "only for slots with a grammar"
        return self.sampling.grammar
