"""Grammars that are slow or fail end only their own request."""

import threading
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from protos.draft import Draft
from protos.errors import InvalidRequestError, failure
from protos.guidance import GrammarError
from protos.messages import Grammar, NewSequence, Row, Sampling
from runtime.text.bad_words import pack_ids
from tests.support.grammar_sampling import VOCAB, engine_of, fresh, is_allowed, logits_of, replaced, said
from tests.support.structured import EOS, words
from workers.sampling import grammar_slots
from workers.sampling.grammar_masks import GrammarMasks
from workers.sampling.grammar_slots import SlotGrammars
from workers.sampling.matcher import Bits
from workers.sampling.sampler import Sampler
from workers.slots import SlotTable


class Slow:
    """Stands in for what follows a sequence, and does not come back."""

    num_fed = 0

    def allowed(self, start: int, tokens: Seq[int]) -> Bits:
        self.done.wait(20)
        return np.zeros(1, np.uint8)

    def __init__(self, done: Any) -> None:
        self.done = done


def test_who_is_too_slow_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()
    monkeypatch.setattr(grammar_slots, "STEP_S", 0.3)
    monkeypatch.setattr(grammar_slots, "NUM_THREADS", 1)
    names = ("choice", "choice", None)
    sampler = engine_of([(name, [], Sampling(slot, 0.0)) for slot, name in enumerate(names)])
    with ThreadPoolExecutor(1) as pool:
        sampler._masks.grammars._state(0).compiled = pool.submit(Slow, done)  # type: ignore[arg-type]
        logits_NV = torch.randn(3, VOCAB)
        chosen = sampler.sample(logits_NV, np.arange(3), np.full(3, 2)).tolist()
        done.set()
    assert chosen[0] == -1
    assert "0.3 s" in sampler.failure_reason(0, logits_NV[:1])
    assert is_allowed("choice", [], [chosen[1]])
    assert chosen[2] == int(logits_NV[2].argmax())
    assert sampler.sample(logits_NV, np.arange(3), np.full(3, 2)).tolist() == chosen


class Brittle:
    """A matcher that fails or hangs after draft tokens."""

    def __init__(self, name: str, done: "threading.Event | None" = None) -> None:
        self._follower, self._done = fresh(name), done

    @property
    def num_fed(self) -> int:
        return self._follower.num_fed

    def allowed(self, start: int, tokens: Seq[int]) -> Bits:
        return self._follower.allowed(start, tokens) if not tokens else self._break()

    def prune(self, start: int, tokens: Seq[int], draft: Draft) -> Draft:
        return self._break()

    def _break(self) -> Any:
        if self._done is None:
            raise GrammarError("over a limit")
        self._done.wait(20)


@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.parametrize("prunes", [False, True])
def test_what_a_draft_token_leads_to_fails_no_request(
    is_slow: bool, prunes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_slots, "STEP_S", 0.5)
    monkeypatch.setattr(grammar_slots, "PRUNE_S", 0.3)
    sequences = [("choice", [], Sampling(0, 0.0)), ("regex", [], Sampling(1, 0.0))]
    sampler, plain = engine_of(sequences), engine_of(sequences)
    grammars, done, guess = sampler._masks.grammars, threading.Event(), Draft((5, 6))
    logits_NV = torch.randn(4, VOCAB)
    with ThreadPoolExecutor(1) as pool:
        grammars._state(0).compiled = pool.submit(Brittle, "choice", done if is_slow else None)  # type: ignore[arg-type]
        rows = [Row(0, 1, 1, 2, k=2), Row(1, 1, 1, 2)]
        if prunes:
            assert [*sampler.prune(rows, [guess, Draft(())])] == [Draft(()), Draft(())]
        sampler.slots.write_draft(0, guess.tokens)
        chosen = sampler.sample(logits_NV, np.array([0, 0, 0, 1]), np.array([2, 3, 4, 2])).tolist()
        done.set()
    roots = plain.sample(logits_NV[[0, 3]], np.arange(2), np.full(2, 2)).tolist()
    assert [chosen[0], chosen[3]] == roots
    assert -1 not in roots
    assert chosen[1] == -1 or prunes
    assert grammars.reason(0) is None
    assert [*sampler.prune(rows, [guess, Draft(())])] == [Draft(()), Draft(())], "it gets no more draft tokens"
    assert sampler.sample(logits_NV[:1], np.array([0]), np.array([2])).tolist() == roots[:1]


def test_what_cannot_be_followed_fails_alone() -> None:
    def unreadable() -> Any:
        raise GrammarError("nobody can read this")

    slots = SlotTable(2, 64, 4)
    sampler = Sampler(slots, VOCAB).with_grammars(GrammarMasks(slots, SlotGrammars(slots, VOCAB, (EOS,), unreadable)))
    for slot, grammar in enumerate((Grammar("regex", "a"), None)):
        slots._join(NewSequence(slot, [1, 7], 2, Sampling(slot, 0.0, grammar=grammar)))
    logits_NV = torch.randn(2, VOCAB)
    assert sampler.sample(logits_NV, np.arange(2), np.full(2, 2)).tolist() == [-1, int(logits_NV[1].argmax())]
    assert sampler.failure_reason(0, logits_NV[:1]) == "structured_outputs: nobody can read this"


def test_a_vocabulary_is_read_ahead_and_again_where_that_failed() -> None:
    tries: list[int] = []

    def at_third_try() -> Any:
        tries.append(1)
        if len(tries) < 3:
            raise OSError("not there")
        return words()

    slots = SlotTable(1, 64, 4)
    grammars = SlotGrammars(slots, VOCAB, (EOS,), at_third_try)
    sampler = Sampler(slots, VOCAB).with_grammars(GrammarMasks(slots, grammars))
    grammars.load()
    chosen = []
    for _ in range(2):
        slots._join(NewSequence(0, [1, 7], 2, replaced(Sampling(0, 0.0), "choice")))
        chosen.append(said(sampler, 0, logits_of))
    assert chosen[0] == -1
    assert is_allowed("choice", [], chosen[1:])
    grammars.load()
    grammars._compilers.shutdown()
    assert len(tries) == 3


def test_clients_are_not_blamed_for_a_vocabulary_that_cannot_be_read(caplog: pytest.LogCaptureFixture) -> None:
    def unreadable() -> Any:
        raise OSError("/secret/path")

    slots = SlotTable(1, 64, 4)
    slots._join(NewSequence(0, [1, 7], 2, replaced(Sampling(0, 0.0), "choice")))
    sampler = Sampler(slots, VOCAB).with_grammars(GrammarMasks(slots, SlotGrammars(slots, VOCAB, (EOS,), unreadable)))
    assert said(sampler, 0, logits_of) == -1
    reason = sampler.failure_reason(0, torch.zeros(1, VOCAB))
    assert not isinstance(failure(reason), InvalidRequestError)
    assert "secret" not in reason
    assert "/secret/path" in caplog.text


def test_nothing_left_is_said_to_be_so() -> None:
    sampler = engine_of([("choice", [], Sampling(0, 0.0, allowed_ids=pack_ids((EOS,))))])
    logits_NV = torch.randn(1, VOCAB)
    assert sampler.sample(logits_NV, np.array([0]), np.array([2])).tolist() == [-1]
    assert "no token is left" in sampler.failure_reason(0, logits_NV)
    assert isinstance(failure(sampler.failure_reason(0, logits_NV)), InvalidRequestError)
    assert "NaN" in sampler.failure_reason(0, logits_NV * torch.nan)
