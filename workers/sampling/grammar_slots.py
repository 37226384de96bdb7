"""The grammars of all sequences on target 0, by slot: compiled once, followed in threads, given up when too slow.

A grammar was tried out before its request was admitted (`runtime.text.grammar_validator`), but no trial walks every
path. So whatever a matcher does happens in a thread, and a sequence whose matcher does not answer in time fails alone.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property, partial
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from protos.draft import NO_DRAFT, Draft
from protos.guidance import GrammarError, matcher
from protos.messages import Grammar, NewSequence, Row
from workers.sampling.matcher import Bits, GrammarMatcher
from workers.slots import SlotTable

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)

NUM_THREADS = 4
STEP_S = 3.0
"""A round waits so long for masks. Longer, and the round itself would count as one that hangs."""
PRUNE_S = 1.5
"""And so long for guesses to be looked at, once for each sequence at most: one that was too slow takes no more."""
COMPILE_S = 4.0
"""And so long for grammars to be compiled: what took longer elsewhere was not admitted."""
REMEMBERED = 32
FAILED = "the grammar could not be followed; the target's log says more"
TOO_SLOW = "structured_outputs: the grammar is too complex to follow here: one step took more than {:g} s"

Words = Callable[[], "LLTokenizer"]
GiveUp = Callable[[int, str], None]
T = TypeVar("T")


@dataclass
class _Followed:
    """A sequence with a grammar.

    Attributes:
        joined: when it came to its slot.
        compiled: follows it.
        settled: how much of its output stays as it is.
        reason: why it cannot go on.
        takes_guesses: whether the grammar is asked about guesses; not after one that it could not cope with.
    """

    joined: int
    compiled: "Future[GrammarMatcher]"
    settled: int = 0
    reason: str | None = None
    takes_guesses: bool = True


class SlotGrammars:
    """What the grammars of the sequences in the slots allow. Used by one thread; owns the threads it works in.

    Args:
        slots: owned by the worker; read only.
        vocab_size: ids that may be chosen.
        eos_ids: ids that end any answer.
        words: returns the vocabulary; called in a thread until it has, by `load` or when the first grammar comes. May
            raise anything; `GrammarError` where requests are to blame.
    """

    def __init__(self, slots: SlotTable, vocab_size: int, eos_ids: Seq[int], words: Words) -> None:
        self._slots, self._vocab_size, self._eos_ids = slots, vocab_size, tuple(eos_ids)
        self._read_words, self._reading = words, Lock()
        self._words: LLTokenizer | None = None
        self._followed: dict[int, _Followed] = {}
        self._compiled: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()

    @cached_property
    def _following(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(NUM_THREADS, "grammar")

    @cached_property
    def _compilers(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(NUM_THREADS, "grammar-compiler")

    def load(self) -> None:
        """Begin to read the vocabulary; where that fails, the first grammar tries again, and says why."""
        self._compilers.submit(self._vocabulary)

    def expect(self, new: Seq[NewSequence]) -> None:
        """Begin to compile the grammars of new sequences, which stand in the slots already."""
        for each in new:
            if each.sampling.grammar is not None:
                self._of(each.slot)

    def reason(self, slot: int) -> str | None:
        """Return why the sequence in *slot* cannot go on; None where its grammar is not to blame."""
        return self._of(slot).reason

    def allowed(self, slots_N: Seq[int], index_N: Seq[int]) -> list[Bits]:
        """Return which ids may be chosen at each index, as `GrammarMatcher.allowed`; none if it fails."""
        asked: dict[int, list[int]] = {}
        for slot, index in zip(slots_N, index_N, strict=True):
            asked.setdefault(slot, []).append(index)
        made: dict[int, dict[int, Bits]] = {slot: {} for slot in asked}

        def give_up(slot: int, reason: str) -> None:
            known = int(self._slots.known_len[slot])
            if known in asked[slot] and known not in made[slot]:
                self._fail(slot, reason)
            else:  # what is said behind committed text does not depend on what a guess led to
                self._take_no_guesses(slot)

        self._run({slot: self._masking(slot, wanted, made[slot]) for slot, wanted in asked.items()}, STEP_S, give_up)
        nothing = np.zeros(-(-self._vocab_size // 8), np.uint8)
        return [made[slot].get(index, nothing) for slot, index in zip(slots_N, index_N, strict=True)]

    def prune(self, rows: Seq[Row], drafts: Seq[Draft]) -> list[Draft]:
        """Return the drafts of *rows* without what a grammar forbids; none where it cannot say."""
        asked = {
            row.slot: draft
            for row, draft in zip(rows, drafts, strict=True)
            if draft.tokens and self._slots.constrained[row.slot]
        }
        jobs = {slot: self._pruning(slot, draft) for slot, draft in asked.items() if self._of(slot).takes_guesses}
        found = self._run(jobs, PRUNE_S, lambda slot, _: self._take_no_guesses(slot))
        return [
            found.get(row.slot, NO_DRAFT) if row.slot in asked else draft
            for row, draft in zip(rows, drafts, strict=True)
        ]

    # What is done in threads.

    def _masking(self, slot: int, wanted: Seq[int], made: dict[int, Bits]) -> Callable[[GrammarMatcher], None]:
        first, tokens = self._tail(slot, max(wanted))
        start = first - int(self._slots.prompt_len[slot])
        return partial(_mask, start=start, texts={index: tokens[: index - first] for index in wanted}, made=made)

    def _pruning(self, slot: int, draft: Draft) -> Callable[[GrammarMatcher], Draft]:
        first, tokens = self._tail(slot, int(self._slots.known_len[slot]))
        return partial(_prune, start=first - int(self._slots.prompt_len[slot]), tokens=tokens, draft=draft)

    def _tail(self, slot: int, end: int) -> tuple[int, list[int]]:
        """Return where the output that may have changed begins, and its tokens up to *end*."""
        first = int(self._slots.prompt_len[slot]) + self._of(slot).settled
        tokens: list[int] = self._slots.tokens[slot, first:end].tolist()
        return first, tokens

    def _run(self, jobs: Mapping[int, Callable[[GrammarMatcher], T]], within_s: float, give_up: GiveUp) -> dict[int, T]:
        """Return what came of each slot's job; of those that failed or took too long, *give_up* is told why."""
        ready = self._ready(jobs)
        futures = {self._following.submit(jobs[slot], follower): slot for slot, follower in ready.items()}
        done, late = wait(futures, within_s)
        found = {slot: future.result() for future in done if _went_well(slot := futures[future], future, give_up)}
        for slot in found:
            self._settle(slot, ready[slot])
        if not late:
            return found
        waited = self._without_late({futures[future]: future for future in late}, within_s, give_up)
        return found | self._run({slot: jobs[slot] for slot in waited}, within_s, give_up)

    def _without_late(self, late: "Mapping[int, Future[T]]", within_s: float, give_up: GiveUp) -> set[int]:
        """Give up the jobs that run, with the threads they run in; return the slots of those behind them."""
        waited = {slot for slot, future in late.items() if future.cancel()}
        self._following.shutdown(wait=False)
        del self._following
        for slot in late.keys() - waited:
            give_up(slot, TOO_SLOW.format(within_s))
        return waited

    def _ready(self, slots: Mapping[int, object]) -> dict[int, GrammarMatcher]:
        """Return what follows each slot's sequence, once its grammar is compiled; leave out those that failed."""
        compiling = {slot: self._of(slot).compiled for slot in slots if self._of(slot).reason is None}
        _, late = wait(compiling.values(), COMPILE_S)
        for slot, future in compiling.items():
            if future in late:
                self._fail(slot, TOO_SLOW.format(COMPILE_S))
        return {
            slot: future.result()
            for slot, future in compiling.items()
            if future not in late and _went_well(slot, future, self._fail)
        }

    def _fail(self, slot: int, reason: str) -> None:
        self._of(slot).reason = reason

    def _take_no_guesses(self, slot: int) -> None:
        """Follow the sequence anew, and by itself: what has failed, or is lost with its thread, is of no use."""
        followed = self._of(slot)
        followed.compiled, followed.settled, followed.takes_guesses = self._begin(slot), 0, False

    def _settle(self, slot: int, follower: GrammarMatcher) -> None:
        """What is committed, and followed, is there to stay."""
        known = int(self._slots.known_len[slot] - self._slots.prompt_len[slot])
        self._of(slot).settled = min(follower.num_fed, known)

    # Which grammar.

    def _of(self, slot: int) -> _Followed:
        """Return what is known of the sequence in *slot*, from its first token on where it has just come."""
        joined = int(self._slots.joined[slot])
        found = self._followed.get(slot)
        if found is None or found.joined != joined:
            found = self._followed[slot] = _Followed(joined, self._begin(slot))
        return found

    def _begin(self, slot: int) -> "Future[GrammarMatcher]":
        sampling = self._slots.sampling[slot]
        assert sampling.grammar is not None, "only asked of slots with a grammar"
        endings = tuple(dict.fromkeys((*self._eos_ids, *sampling.stop_ids)))
        return self._compilers.submit(self._follow, self._compiling(sampling.grammar), endings)

    def _follow(self, compiled: "Future[LLMatcher]", endings: Seq[int]) -> GrammarMatcher:
        return GrammarMatcher(compiled.result().deep_copy(), self._vocab_size, endings)

    def _compiling(self, grammar: Grammar) -> "Future[LLMatcher]":
        """Return the matcher of *grammar*, which nobody moves: sequences with the same one copy it."""
        found = self._compiled.get(grammar)
        if found is None or (found.done() and found.exception() is not None):
            found = self._compiled[grammar] = self._compilers.submit(self._compile, grammar)
            if len(self._compiled) > REMEMBERED:
                self._compiled.popitem(last=False)
        else:
            self._compiled.move_to_end(grammar)
        return found

    def _compile(self, grammar: Grammar) -> "LLMatcher":
        return matcher(grammar, self._vocabulary())

    def _vocabulary(self) -> "LLTokenizer":
        with self._reading:
            if self._words is None:
                self._words = self._read_words()
            return self._words


def _went_well(slot: int, future: "Future[Any]", give_up: GiveUp) -> bool:
    """Whether a job was done; if not, *give_up* is told why."""
    error = future.exception()
    if error is not None and not isinstance(error, GrammarError):
        logger.error("a grammar failed", exc_info=error)
    if error is not None:
        give_up(slot, f"structured_outputs: {error}" if isinstance(error, GrammarError) else FAILED)
    return error is None


def _mask(follower: GrammarMatcher, start: int, texts: Mapping[int, Seq[int]], made: dict[int, Bits]) -> None:
    """Make masks one by one: what is made stays made, whatever comes of the next."""
    for index, tokens in texts.items():
        made[index] = follower.allowed(start, tokens)


def _prune(follower: GrammarMatcher, start: int, tokens: Seq[int], draft: Draft) -> Draft:
    return follower.prune(start, tokens, draft)
