"""The grammars of all sequences on target rank 0, by slot.

A grammar was tested before its request was admitted (`runtime.text.grammar_validator`), but no test covers every path.
So grammars are followed in processes, and a row whose mask is not ready skips its turn: the round goes on without it.
Masks are asked for before a round's forward and read after it.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from itertools import count

import numpy as np

from protos.draft import NO_DRAFT, Draft
from protos.grammars.host import GrammarHost
from protos.guidance import GrammarError
from protos.messages import Grammar, NewSequence, Row
from workers.sampling.grammar_followers import Follower, Followers
from workers.sampling.grammar_process import Follow, Followed
from workers.sampling.grammar_state import TOO_SLOW, FollowLimits, SlotGrammar, Tail
from workers.sampling.matcher import Bits
from workers.slots import SlotTable

MAX_REFUSED = 256
REFUSED_S = 600.0
"""A grammar that was too slow is refused for so long."""


class SlotGrammars:
    """Follows the grammars of the sequences in the slots. Not thread-safe.

    Args:
        slots: owned by the worker; read only.
        vocab_size: number of ids that may be sampled.
        eos_ids: ids that end any output.
        host: starts processes that follow grammars.
        limits: on waiting for them.
    """

    def __init__(
        self,
        slots: SlotTable,
        vocab_size: int,
        eos_ids: Seq[int],
        host: GrammarHost,
        limits: FollowLimits | None = None,
    ) -> None:
        self._slots, self._eos_ids = slots, tuple(eos_ids)
        self._nothing = np.zeros(-(-vocab_size // 8), np.uint8)
        self._limits = limits or FollowLimits()
        self._followers = Followers(host, vocab_size, self._limits.budget_s)
        self._grammars: dict[int, SlotGrammar] = {}
        self._by_number: dict[int, SlotGrammar] = {}
        self._numbers = count()
        self._refused: OrderedDict[Grammar, float] = OrderedDict()
        self._wanted: dict[int, list[Tail]] = {}
        self._skipped: set[int] = set()
        self._is_urgent = False

    def load(self) -> None:
        """Begin to read the vocabulary. If that fails, the first grammar tries again, and reports the error."""
        self._followers.load()

    def expect(self, new: Seq[NewSequence]) -> None:
        """Begin to compile the grammars of new sequences, which are in the slots already."""
        for each in new:
            if each.sampling.grammar is not None:
                self._reach(self._state(each.slot))

    def reason(self, slot: int) -> str | None:
        """Return why the grammar of the sequence in *slot* failed; None if it has not."""
        return self._state(slot).reason

    def skips(self, slot: int) -> bool:
        """Whether the row of *slot* skips its turn: a mask that was asked for since `begin` was not ready."""
        return slot in self._skipped

    def begin(self, rows: Seq[Row], drafts: Seq[Draft]) -> None:
        """Ask for the masks of a round; *drafts* are pruned."""
        self._skipped.clear()
        self._is_urgent = False
        for row, draft in zip(rows, drafts, strict=True):
            if not self._slots.constrained[row.slot]:
                self._is_urgent = True
            elif row.samples:
                state = self._state(row.slot)
                self._is_urgent |= state.patience_s > 0
                chain = draft.tokens if draft.is_chain and state.prunes_drafts else ()
                self._ask(state, [chain[:length] for length in range(len(chain) + 1)])

    def allowed(self, slots_N: Seq[int], index_N: Seq[int]) -> list[Bits]:
        """Return the ids allowed at each index, as `GrammarMatcher.allowed` does; no ids if the row skips or fails."""
        tails_N = [self._tail(slot, index) for slot, index in zip(slots_N, index_N, strict=True)]
        self._wanted = {slot: [] for slot in slots_N}
        for slot, tail in zip(slots_N, tails_N, strict=True):
            self._wanted[slot].append(tail)
            self._state(slot)
        self._skipped.update(self._wait(self._wanted, self._has_masks))
        return [
            self._nothing if slot in self._skipped else self._state(slot).masks.get(tail, self._nothing)
            for slot, tail in zip(slots_N, tails_N, strict=True)
        ]

    def prune(self, rows: Seq[Row], drafts: Seq[Draft]) -> list[Draft]:
        """Return the drafts of *rows* without tokens that a grammar forbids; empty ones if that takes too long."""
        constrained = {
            row.slot: draft
            for row, draft in zip(rows, drafts, strict=True)
            if draft.tokens and self._slots.constrained[row.slot]
        }
        self._is_urgent = True
        for slot, draft in constrained.items():
            state = self._state(slot)
            if state.prunes_drafts:
                self._ask(state, [], draft)
        self._wait(constrained, self._has_draft)
        return [
            (self._state(row.slot).pruned or NO_DRAFT) if row.slot in constrained else draft
            for row, draft in zip(rows, drafts, strict=True)
        ]

    # What is ready.

    def _has_masks(self, slot: int) -> bool:
        """Whether the masks wanted are there, or will not come. Asks for those that were not asked for."""
        state = self._grammars[slot]
        if state.asked_at is not None and not state.masks:
            return False
        tails = self._wanted[slot] if state.prunes_drafts else [()]
        if state.reason is not None or all(tail in state.masks for tail in tails):
            return True
        self._ask(state, tails)
        return state.reason is not None

    def _has_draft(self, slot: int) -> bool:
        """Whether the pruned draft is there, or will not come: it was not asked for where no process is ready."""
        state = self._grammars[slot]
        if state.asked_at is None or state.reason is not None:
            return True
        return state.pruned is not None or not state.prunes_drafts

    def _tail(self, slot: int, index: int) -> Tail:
        return tuple(self._slots.tokens[slot, self._slots.known_len[slot] : index].tolist())

    # Questions and answers.

    def _ask(self, state: SlotGrammar, tails: Seq[Tail], draft: Draft | None = None) -> None:
        """Ask for masks or a pruned draft, unless they are there or something else is being answered."""
        wanted = [tail for tail in tails if tail not in state.masks]
        if state.asked_at is not None or not (wanted or draft) or not self._reach(state):
            return
        assert state.follower is not None
        prompt_len = int(self._slots.prompt_len[state.slot])
        tokens = self._slots.tokens[state.slot, prompt_len + state.settled : state.known_len].tolist()
        state.asked_at, state.asked_len = time.monotonic(), state.known_len - prompt_len
        state.asked_draft = draft is not None or any(wanted)
        endings = tuple(dict.fromkeys((*self._eos_ids, *state.sampling.stop_ids)))
        state.follower.ask(Follow(state.number, endings, state.settled, tokens, wanted, draft))

    def _reach(self, state: SlotGrammar) -> bool:
        """Find a process for a sequence; return whether there is one."""
        if state.follower is not None and not state.follower.asked:
            self._take(state.follower)  # it may have ended since
        if state.follower is None and state.reason is None:
            try:
                state.follower = self._followers.find(state.grammar, state.number)
            except GrammarError as error:
                state.reason = f"structured_outputs: {error}"
            except RuntimeError as error:
                state.reason = str(error)
        return state.follower is not None and state.reason is None

    def _take(self, follower: Follower) -> None:
        """Take what a process has answered."""
        follower.process.exchange()
        while (answer := follower.take()) is not None:
            state = self._by_number.get(answer.sequence)
            if state is not None:
                self._record(state, answer)
        if follower.process.has_ended:
            self._end(follower)

    def _record(self, state: SlotGrammar, answer: Followed) -> None:
        if answer.draft is not None:
            state.pruned = answer.draft
        if not answer.is_last:
            return
        took_s = time.monotonic() - (state.asked_at or 0.0)
        state.late_s += took_s if took_s > self._limits.round_s else 0.0
        state.asked_at, state.settled = None, min(answer.num_fed, state.asked_len)
        state.patience_s = min(state.patience_s + self._limits.regained_s, self._limits.patience_s)
        state.prunes_drafts &= not (state.asked_draft and took_s > self._limits.draft_s)
        state.masks.update(zip(answer.tails, (np.frombuffer(mask, np.uint8) for mask in answer.masks), strict=True))
        if answer.reason is not None:
            self._fail(state, answer.reason)

    def _fail(self, state: SlotGrammar, reason: str) -> None:
        """Fail a sequence; if draft tokens may be to blame, only have it get no more of them."""
        if state.asked_draft and state.prunes_drafts:
            state.prunes_drafts = False
        else:
            state.reason = f"structured_outputs: {reason}"

    def _end(self, follower: Follower) -> None:
        """End a process, and fail the sequence that it was busy with; the others find another process."""
        self._followers.drop(follower)
        at_fault = follower.asked[0] if follower.asked else None
        for state in [each for each in self._by_number.values() if each.follower is follower]:
            if state.number == at_fault:
                self._fail(state, TOO_SLOW.format(self._limits.budget_s))
                if state.reason is not None:
                    self._refused[state.grammar] = time.monotonic() + REFUSED_S
            state.follower, state.asked_at, state.settled = None, None, 0
        while len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)

    # Waiting.

    def _wait(self, slots: Iterable[int], is_ready: Callable[[int], bool]) -> list[int]:
        """Take answers until all *slots* are ready, or the round waits no longer; return those that are not."""
        began = time.monotonic()
        while True:
            for follower in self._busy(slots):
                self._take(follower)
            waited_s = time.monotonic() - began
            slots = [slot for slot in slots if not self._is_settled(slot, is_ready, waited_s)]
            left_s = max((self._wait_s(slot) for slot in slots), default=0.0) - waited_s
            if left_s <= 0:
                self._judge(slots, waited_s)
                return slots
            self._followers.wait(self._busy(slots), left_s)

    def _is_settled(self, slot: int, is_ready: Callable[[int], bool], waited_s: float) -> bool:
        """Whether a slot is ready; if so, take from its patience how long it was waited for."""
        if not is_ready(slot):
            return False
        self._grammars[slot].patience_s -= min(waited_s, self._grammars[slot].patience_s)
        return True

    def _busy(self, slots: Iterable[int]) -> list[Follower]:
        found = [self._grammars[slot].follower for slot in slots]
        return list(dict.fromkeys(each for each in found if each is not None))

    def _wait_s(self, slot: int) -> float:
        """Return how long the round waits for a slot."""
        limits, state = self._limits, self._grammars[slot]
        return min(limits.round_s, state.patience_s) if self._is_urgent else limits.round_s

    def _judge(self, slots: Seq[int], waited_s: float) -> None:
        """Take the patience with *slots*, which were not ready, and end what has taken too long."""
        now = time.monotonic()
        for state in map(self._state, slots):
            state.patience_s = max(0.0, state.patience_s - waited_s)
            if state.follower is None or state.asked_at is None:
                continue
            if not state.patience_s:
                state.follower.give_way()
            if state.late_s + now - state.asked_at > self._limits.longest_s:
                self._end(state.follower)

    # States.

    def _state(self, slot: int) -> SlotGrammar:
        """Return the state of the sequence in *slot*; a new one if the sequence is new."""
        generation, known_len = int(self._slots.generation[slot]), int(self._slots.known_len[slot])
        state = self._grammars.get(slot)
        if state is None or state.generation != generation:
            if state is not None:
                self._leave(state)
            state = self._grammars[slot] = self._new(slot, generation)
        if state.known_len != known_len:
            state.known_len, state.pruned = known_len, None
            state.masks.clear()
        return state

    def _new(self, slot: int, generation: int) -> SlotGrammar:
        state = SlotGrammar(slot, generation, next(self._numbers), self._slots.sampling[slot], self._limits.patience_s)
        if self._refused.get(state.grammar, 0.0) > time.monotonic():
            state.reason = f"structured_outputs: {TOO_SLOW.format(self._limits.budget_s)}"
        self._by_number[state.number] = state
        return state

    def _leave(self, state: SlotGrammar) -> None:
        del self._by_number[state.number]
        if state.follower is not None:
            self._followers.leave(state.follower, state.number)
