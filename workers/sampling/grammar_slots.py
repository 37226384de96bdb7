"""The grammars of all sequences on target rank 0, by slot: compiled once, matched in threads, with timeouts.

A grammar was tested before its request was admitted (`runtime.text.grammar_validator`), but no test covers every path.
So matchers run in threads, and a sequence whose matcher does not finish in time fails alone.
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
from protos.guidance import GrammarError
from protos.guidance import matcher as compile_grammar
from protos.messages import Grammar, NewSequence, Row
from workers.sampling.matcher import Bits, GrammarMatcher
from workers.slots import SlotTable

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)

NUM_THREADS = 4
STEP_S = 3.0
"""A round waits this long for masks: not so long that the round itself would count as hung."""
PRUNE_S = 1.5
"""And this long for drafts to be pruned, once for each sequence at most: one that was too slow gets no more drafts."""
COMPILE_S = 4.0
"""And this long for grammars to compile; requests whose grammar took longer were not admitted."""
MAX_COMPILED = 32
FAILED = "the grammar failed; the target's log has the reason"
TOO_SLOW = "structured_outputs: the grammar is too complex to follow here: one step took more than {:g} s"

LoadVocabulary = Callable[[], "LLTokenizer"]
OnFailure = Callable[[int, str], None]
T = TypeVar("T")


@dataclass
class _SlotGrammar:
    """The grammar of the sequence in a slot.

    Attributes:
        joined: generation of the sequence, as in `SlotTable`.
        compiled: matches its output.
        settled: number of output tokens that are matched and committed.
        reason: why the sequence failed.
        prunes_drafts: False after a draft on which the matcher failed.
    """

    joined: int
    compiled: "Future[GrammarMatcher]"
    settled: int = 0
    reason: str | None = None
    prunes_drafts: bool = True


class SlotGrammars:
    """Compiles and matches the grammars of the sequences in the slots, in its own threads. Not thread-safe.

    Args:
        slots: owned by the worker; read only.
        vocab_size: number of ids that may be sampled.
        eos_ids: ids that end any output.
        load_vocabulary: returns the vocabulary; called in a thread, by `load` or for the first grammar, until it
            succeeds. May raise any exception; `GrammarError` if it is the request's fault.
    """

    def __init__(self, slots: SlotTable, vocab_size: int, eos_ids: Seq[int], load_vocabulary: LoadVocabulary) -> None:
        self._slots, self._vocab_size, self._eos_ids = slots, vocab_size, tuple(eos_ids)
        self._load_vocabulary, self._vocabulary_lock = load_vocabulary, Lock()
        self._tokenizer: LLTokenizer | None = None
        self._grammars: dict[int, _SlotGrammar] = {}
        self._compiled: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()

    @cached_property
    def _matching(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(NUM_THREADS, "grammar")

    @cached_property
    def _compilers(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(NUM_THREADS, "grammar-compiler")

    def load(self) -> None:
        """Begin to read the vocabulary. If that fails, the first grammar tries again, and reports the error."""
        self._compilers.submit(self._vocabulary)

    def expect(self, new: Seq[NewSequence]) -> None:
        """Begin to compile the grammars of new sequences, which are in the slots already."""
        for each in new:
            if each.sampling.grammar is not None:
                self._state(each.slot)

    def reason(self, slot: int) -> str | None:
        """Return why the grammar of the sequence in *slot* failed; None if it has not."""
        return self._state(slot).reason

    def allowed(self, slots_N: Seq[int], index_N: Seq[int]) -> list[Bits]:
        """Return the ids allowed at each index, as `GrammarMatcher.allowed` does; no ids if the matcher fails."""
        indices: dict[int, list[int]] = {}
        for slot, index in zip(slots_N, index_N, strict=True):
            indices.setdefault(slot, []).append(index)
        masks: dict[int, dict[int, Bits]] = {slot: {} for slot in indices}

        def on_failure(slot: int, reason: str) -> None:
            known = int(self._slots.known_len[slot])
            if known in indices[slot] and known not in masks[slot]:
                self._fail(slot, reason)
            else:  # masks after committed text do not depend on draft tokens
                self._stop_pruning(slot)

        self._run(
            {slot: self._masking(slot, wanted, masks[slot]) for slot, wanted in indices.items()},
            STEP_S,
            on_failure,
        )
        nothing = np.zeros(-(-self._vocab_size // 8), np.uint8)
        return [masks[slot].get(index, nothing) for slot, index in zip(slots_N, index_N, strict=True)]

    def prune(self, rows: Seq[Row], drafts: Seq[Draft]) -> list[Draft]:
        """Return the drafts of *rows* without tokens that a grammar forbids; empty ones if the matcher fails."""
        constrained = {
            row.slot: draft
            for row, draft in zip(rows, drafts, strict=True)
            if draft.tokens and self._slots.constrained[row.slot]
        }
        jobs = {
            slot: self._pruning(slot, draft) for slot, draft in constrained.items() if self._state(slot).prunes_drafts
        }
        results = self._run(jobs, PRUNE_S, lambda slot, _: self._stop_pruning(slot))
        return [
            results.get(row.slot, NO_DRAFT) if row.slot in constrained else draft
            for row, draft in zip(rows, drafts, strict=True)
        ]

    # Jobs of the threads.

    def _masking(self, slot: int, wanted: Seq[int], masks: dict[int, Bits]) -> Callable[[GrammarMatcher], None]:
        first, tokens = self._tail(slot, max(wanted))
        start = first - int(self._slots.prompt_len[slot])
        return partial(_mask, start=start, texts={index: tokens[: index - first] for index in wanted}, masks=masks)

    def _pruning(self, slot: int, draft: Draft) -> Callable[[GrammarMatcher], Draft]:
        first, tokens = self._tail(slot, int(self._slots.known_len[slot]))
        return partial(_prune, start=first - int(self._slots.prompt_len[slot]), tokens=tokens, draft=draft)

    def _tail(self, slot: int, end: int) -> tuple[int, list[int]]:
        """Return the position after the settled output, and the tokens from there up to *end*."""
        first = int(self._slots.prompt_len[slot]) + self._state(slot).settled
        tokens: list[int] = self._slots.tokens[slot, first:end].tolist()
        return first, tokens

    def _run(
        self, jobs: Mapping[int, Callable[[GrammarMatcher], T]], timeout_s: float, on_failure: OnFailure
    ) -> dict[int, T]:
        """Return the result of each slot's job; call *on_failure* for those that fail or take too long."""
        ready = self._ready(jobs)
        futures = {self._matching.submit(jobs[slot], matcher): slot for slot, matcher in ready.items()}
        done, late = wait(futures, timeout_s)
        results = {slot: future.result() for future in done if _succeeded(slot := futures[future], future, on_failure)}
        for slot in results:
            self._settle(slot, ready[slot])
        if not late:
            return results
        pending = self._drop_late({futures[future]: future for future in late}, timeout_s, on_failure)
        return results | self._run({slot: jobs[slot] for slot in pending}, timeout_s, on_failure)

    def _drop_late(self, late: "Mapping[int, Future[T]]", timeout_s: float, on_failure: OnFailure) -> set[int]:
        """Abandon running jobs and their threads; return the slots of the jobs that had not started."""
        pending = {slot for slot, future in late.items() if future.cancel()}
        self._matching.shutdown(wait=False)
        del self._matching
        for slot in late.keys() - pending:
            on_failure(slot, TOO_SLOW.format(timeout_s))
        return pending

    def _ready(self, slots: Mapping[int, object]) -> dict[int, GrammarMatcher]:
        """Return each slot's matcher, once its grammar is compiled; leave out those that failed."""
        compiling = {slot: self._state(slot).compiled for slot in slots if self._state(slot).reason is None}
        _, late = wait(compiling.values(), COMPILE_S)
        for slot, future in compiling.items():
            if future in late:
                self._fail(slot, TOO_SLOW.format(COMPILE_S))
        return {
            slot: future.result()
            for slot, future in compiling.items()
            if future not in late and _succeeded(slot, future, self._fail)
        }

    def _fail(self, slot: int, reason: str) -> None:
        self._state(slot).reason = reason

    def _stop_pruning(self, slot: int) -> None:
        """Make a new matcher, which gets no more drafts; the old one failed, or is lost with its thread."""
        state = self._state(slot)
        state.compiled, state.settled, state.prunes_drafts = self._begin(slot), 0, False

    def _settle(self, slot: int, matcher: GrammarMatcher) -> None:
        """Record how much of the output is matched and committed."""
        known = int(self._slots.known_len[slot] - self._slots.prompt_len[slot])
        self._state(slot).settled = min(matcher.num_fed, known)

    # Compiled grammars.

    def _state(self, slot: int) -> _SlotGrammar:
        """Return the state of the sequence in *slot*; a new one if the sequence is new."""
        joined = int(self._slots.joined[slot])
        state = self._grammars.get(slot)
        if state is None or state.joined != joined:
            state = self._grammars[slot] = _SlotGrammar(joined, self._begin(slot))
        return state

    def _begin(self, slot: int) -> "Future[GrammarMatcher]":
        sampling = self._slots.sampling[slot]
        assert sampling.grammar is not None, "only for slots with a grammar"
        endings = tuple(dict.fromkeys((*self._eos_ids, *sampling.stop_ids)))
        return self._compilers.submit(self._make_matcher, self._compiled_grammar(sampling.grammar), endings)

    def _make_matcher(self, compiled: "Future[LLMatcher]", endings: Seq[int]) -> GrammarMatcher:
        return GrammarMatcher(compiled.result().deep_copy(), self._vocab_size, endings)

    def _compiled_grammar(self, grammar: Grammar) -> "Future[LLMatcher]":
        """Return the compiled *grammar*, which sequences copy."""
        compiled = self._compiled.get(grammar)
        if compiled is None or (compiled.done() and compiled.exception() is not None):
            compiled = self._compiled[grammar] = self._compilers.submit(self._compile, grammar)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        else:
            self._compiled.move_to_end(grammar)
        return compiled

    def _compile(self, grammar: Grammar) -> "LLMatcher":
        return compile_grammar(grammar, self._vocabulary())

    def _vocabulary(self) -> "LLTokenizer":
        with self._vocabulary_lock:
            if self._tokenizer is None:
                self._tokenizer = self._load_vocabulary()
            return self._tokenizer


def _succeeded(slot: int, future: "Future[Any]", on_failure: OnFailure) -> bool:
    """Whether a job succeeded; if not, call *on_failure* with the reason."""
    error = future.exception()
    if error is not None and not isinstance(error, GrammarError):
        logger.error("a grammar failed", exc_info=error)
    if error is not None:
        on_failure(slot, f"structured_outputs: {error}" if isinstance(error, GrammarError) else FAILED)
    return error is None


def _mask(matcher: GrammarMatcher, start: int, texts: Mapping[int, Seq[int]], masks: dict[int, Bits]) -> None:
    """Add the masks one by one, so that earlier ones remain if a later one fails."""
    for index, tokens in texts.items():
        masks[index] = matcher.allowed(start, tokens)


def _prune(matcher: GrammarMatcher, start: int, tokens: Seq[int], draft: Draft) -> Draft:
    return matcher.prune(start, tokens, draft)
