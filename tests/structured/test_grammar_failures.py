"""Grammars that are slow or fail reach only their own request: its row skips its turn, and fails in the end."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from protos.draft import Draft
from protos.errors import InvalidRequestError, failure
from protos.grammars import fork
from protos.grammars.fork import Refusal, framed
from protos.grammars.host import GrammarHost, GrammarProcess, wait_for
from protos.guidance import GrammarError
from protos.messages import Grammar, NewSequence, Row, Sampling
from runtime.text.token_options import pack_ids
from tests.structured.brittle_followers import brittle_host
from tests.support.grammar_sampling import PATIENT, VOCAB, engine_of, is_allowed, logits_of, replaced, said
from tests.support.structured import EOS, word_list
from workers.sampling.grammar_followers import MODULE
from workers.sampling.grammar_masks import GrammarMasks
from workers.sampling.grammar_slots import SlotGrammars
from workers.sampling.grammar_state import FollowLimits
from workers.sampling.sampler import Sampler
from workers.slots import SlotTable

HASTY = FollowLimits(round_s=0.02, patience_s=0.1, draft_s=60, budget_s=0.4, longest_s=60)
LONGEST_S = 60.0


@pytest.fixture(scope="module")
def brittle() -> Iterator[GrammarHost]:
    host = brittle_host()
    host.start()
    yield host
    host.close()


def rounds(sampler: Sampler, names: list[str | None]) -> Iterator[list[int]]:
    """Yield what rounds of one token sample, until a row has failed."""
    rows, drafts = [Row(slot, 1, 1, 2) for slot in range(len(names))], [Draft(())] * len(names)
    logits_NV, began = torch.randn(len(names), VOCAB), time.monotonic()
    grammars = sampler._masks.grammars  # type: ignore[union-attr]
    while not any(grammars.reason(slot) for slot, name in enumerate(names) if name):
        assert time.monotonic() - began < LONGEST_S
        sampler.begin(rows, drafts)
        yield sampler.sample(logits_NV, np.arange(len(names)), np.full(len(names), 2)).tolist()


def test_who_is_too_slow_skips_its_turns_and_fails_alone(brittle: GrammarHost) -> None:
    names = ["regex", "choice", None]
    sampler = engine_of([(name, [], Sampling(slot, 0.0)) for slot, name in enumerate(names)], HASTY, brittle)
    others, skipped = set(), 0
    for chosen in rounds(sampler, names):
        assert chosen[0] == -1
        skipped += sampler.skips(0)
        others.add(chosen[2])
        assert sampler.skips(1) or is_allowed("choice", [], [chosen[1]])
    assert skipped > 1
    assert len(others) == 1
    assert "0.4 s of a processor" in sampler.failure_reason(0, torch.zeros(1, VOCAB))
    assert isinstance(failure(sampler.failure_reason(0, torch.zeros(1, VOCAB))), InvalidRequestError)
    assert sampler._masks.grammars.reason(1) is None  # type: ignore[union-attr]


def test_what_was_too_slow_is_refused_at_once(brittle: GrammarHost) -> None:
    sampler = engine_of([("regex", [], Sampling(0, 0.0))], HASTY, brittle)
    for _ in rounds(sampler, ["regex"]):
        pass
    sampler.slots._join(NewSequence(0, [1, 7], 2, replaced(Sampling(1, 0.0), "regex")))
    grammars = sampler._masks.grammars  # type: ignore[union-attr]
    assert "too complex to follow" in grammars.reason(0)
    assert grammars._state(0).follower is None


def test_a_row_resumes_when_its_mask_is_ready() -> None:
    hurried = FollowLimits(round_s=0.0, patience_s=0.0, draft_s=60, budget_s=60, longest_s=60)
    sequences = [("choice", [], Sampling(0, 1.0)), (None, [], Sampling(1, 0.0))]
    logits_NV, found, skipped = torch.randn(2, VOCAB), -1, 0
    sampler, began = engine_of(sequences, hurried), time.monotonic()
    while found == -1 and time.monotonic() - began < LONGEST_S:
        sampler.begin([Row(0, 1, 1, 2), Row(1, 1, 1, 2)], [Draft(())] * 2)
        found = sampler.sample(logits_NV, np.arange(2), np.full(2, 2)).tolist()[0]
        skipped += sampler.skips(0)
    assert skipped > 0
    assert found == engine_of(sequences).sample(logits_NV, np.arange(2), np.full(2, 2)).tolist()[0]


@pytest.mark.parametrize("name", ["choice", "lark"], ids=["fails", "spins"])
def test_what_a_draft_token_leads_to_fails_no_request(name: str, brittle: GrammarHost) -> None:
    limits = FollowLimits(round_s=60, patience_s=60, draft_s=60, budget_s=0.4, longest_s=60)
    sequences = [(name, [], Sampling(0, 0.0)), ("compact", [], Sampling(1, 0.0))]
    sampler, plain = engine_of(sequences, limits, brittle), engine_of(sequences)
    guess, rows = Draft((5, 6)), [Row(0, 1, 1, 2, k=2), Row(1, 1, 1, 2)]
    assert [*sampler.prune(rows, [guess, Draft(())])] == [Draft(()), Draft(())]
    sampler.begin(rows, [Draft(()), Draft(())])
    logits_NV = torch.randn(2, VOCAB)
    chosen = sampler.sample(logits_NV, np.arange(2), np.full(2, 2)).tolist()
    assert chosen == plain.sample(logits_NV, np.arange(2), np.full(2, 2)).tolist()
    assert -1 not in chosen
    assert sampler._masks.grammars.reason(0) is None  # type: ignore[union-attr]
    assert [*sampler.prune(rows, [guess, Draft(())])] == [Draft(()), Draft(())], "it gets no more draft tokens"


def test_slow_drafts_are_given_up() -> None:
    limits = FollowLimits(round_s=60, patience_s=60, draft_s=0.0, budget_s=60, longest_s=60)
    sampler = engine_of([("choice", [], Sampling(0, 0.0))], limits)
    rows, logits_NV = [Row(0, 1, 1, 2, k=1)], torch.randn(1, VOCAB)
    sampler.begin(rows, [Draft(())])  # a process is ready after that
    first = sampler.sample(logits_NV, np.array([0]), np.array([2])).tolist()
    assert is_allowed("choice", [], first)
    assert [*sampler.prune(rows, [Draft((first[0],))])] == [Draft((first[0],))]
    sampler.slots.known_len[0] += 1
    assert [*sampler.prune(rows, [Draft((first[0],))])] == [Draft(())]


def test_a_draft_does_not_wait_for_a_process_that_is_not_ready(brittle: GrammarHost) -> None:
    sampler = engine_of([("choice", [], Sampling(0, 0.0))], PATIENT, brittle)
    followers = sampler._masks.grammars._followers  # type: ignore[union-attr]
    followers.find = lambda grammar, number: None  # type: ignore[method-assign]
    began = time.monotonic()
    assert [*sampler.prune([Row(0, 1, 1, 2, k=1)], [Draft((5,))])] == [Draft(())]
    assert time.monotonic() - began < 1.0


def test_a_process_that_is_killed_is_replaced() -> None:
    sampler, plain = (engine_of([("regex", [], Sampling(0, 0.0))]) for _ in range(2))
    tokens: list[list[int]] = [[], []]
    for step in range(4):
        for each, found in zip((sampler, plain), tokens, strict=True):
            found.append(said(each, 0, logits_of))
            each.slots.tokens[0, 2 + step] = found[-1]
            each.slots.known_len[0] += 1
        follower = sampler._masks.grammars._state(0).follower  # type: ignore[union-attr]
        os.kill(follower.process._pid, signal.SIGKILL)
        while not follower.process.has_ended:
            follower.process.exchange()
    assert tokens[0] == tokens[1]
    assert -1 not in tokens[0]


def sampler_with(load_vocabulary: Any) -> Sampler:
    """Return the sampler of two sequences, the first with a grammar."""
    slots = SlotTable(2, 64, 4)
    grammars = SlotGrammars(slots, VOCAB, (EOS,), GrammarHost(MODULE, load_vocabulary), PATIENT)
    for slot, grammar in enumerate((Grammar("regex", "a"), None)):
        slots._join(NewSequence(slot, [1, 7], 2, Sampling(slot, 0.0, grammar=grammar)))
    return Sampler(slots, VOCAB).with_grammars(GrammarMasks(slots, grammars))


def test_what_cannot_be_followed_fails_alone() -> None:
    def unreadable() -> Any:
        raise GrammarError("nobody can read this")

    sampler, logits_NV = sampler_with(unreadable), torch.randn(2, VOCAB)
    assert sampler.sample(logits_NV, np.arange(2), np.full(2, 2)).tolist() == [-1, int(logits_NV[1].argmax())]
    assert sampler.failure_reason(0, logits_NV[:1]) == "structured_outputs: nobody can read this"


def test_a_vocabulary_is_read_ahead_and_again_where_that_failed() -> None:
    tries: list[int] = []

    def at_second_try() -> Any:
        tries.append(1)
        if len(tries) < 2:
            raise OSError("not there")
        return word_list()

    sampler = sampler_with(at_second_try)
    sampler._masks.grammars.load()  # type: ignore[union-attr]
    chosen = []
    for _ in range(2):
        sampler.slots._join(NewSequence(0, [1, 7], 2, replaced(Sampling(0, 0.0), "choice")))
        chosen.append(said(sampler, 0, logits_of))
    assert chosen[0] == -1
    assert is_allowed("choice", [], chosen[1:])
    assert len(tries) == 2


def test_clients_are_not_blamed_for_a_vocabulary_that_cannot_be_read(caplog: pytest.LogCaptureFixture) -> None:
    def unreadable() -> Any:
        raise OSError("/secret/path")

    sampler = sampler_with(unreadable)
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


def test_an_answer_that_came_while_something_was_sent_is_not_waited_for() -> None:
    """It is in the process's buffer already, so the socket stays silent."""
    ours, theirs = socket.socketpair()
    answer = framed(Refusal("no"))
    with theirs:
        process = GrammarProcess(ours, pid=1)
        theirs.sendall(answer[:3])
        process.exchange()
        assert not process.has_message
        theirs.sendall(answer[3:])
        process.send(Refusal())
        began = time.monotonic()
        wait_for([process], 30.0)
        assert time.monotonic() - began < 15.0
        assert process.take(Refusal) == Refusal("no")


def test_a_process_whose_parent_ended_before_it_read_ends_in_silence() -> None:
    """It printed a traceback into the log of a server that was stopped while it loaded."""
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(framed(Refusal()))
        ours.close()
        with pytest.raises(SystemExit):
            fork._received(theirs)
