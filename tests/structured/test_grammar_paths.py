"""What a grammar allows does not depend on how one came there: by drafts, along trees, or token by token."""

import random
import threading
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.draft import Draft
from protos.errors import InvalidRequestError, failure
from protos.guidance import GrammarError, matcher
from protos.messages import Grammar, NewSequence, Row, Sampling
from tests.support.structured import EOS, FORMS, tokenizer, vocab_size, words
from tests.support.tree_proposer import random_tree
from workers.sampling import grammar_slots
from workers.sampling.grammar_masks import GrammarMasks, masked
from workers.sampling.grammar_slots import SlotGrammars
from workers.sampling.matcher import Bits, GrammarMatcher
from workers.sampling.sampler import Sampler
from workers.slots import SlotTable
from workers.verification.acceptance import SampleAndMatch, Scored
from workers.verification.probes import accept_with_probes

VOCAB = vocab_size()
NAMES = sorted(FORMS)


def fresh(name: str, endings: Seq[int] = (EOS,)) -> GrammarMatcher:
    return GrammarMatcher(matcher(FORMS[name].grammar, words()), VOCAB, endings)


def ids_of(bits: Bits) -> list[int]:
    return np.flatnonzero(np.unpackbits(bits, count=VOCAB, bitorder="little")).tolist()


def walk(name: str, length: int, dice: random.Random) -> list[int]:
    """Return a text that the grammar allows, or the beginning of one; without an end."""
    found: list[int] = []
    for _ in range(length):
        allowed = [i for i in ids_of(fresh(name).allowed(0, found)) if i != EOS]
        if not allowed:
            break
        found.append(dice.choice(allowed))
    return found


@settings(max_examples=15, deadline=None)
@given(name=st.sampled_from(NAMES), seed=st.integers(0, 10**6))
def test_what_is_allowed_depends_on_the_text_alone(name: str, seed: int) -> None:
    dice = random.Random(seed)
    text, follower = walk(name, 14, dice), fresh(name)
    for _ in range(12):
        output = text[: dice.randint(0, len(text))]
        if dice.random() < 0.5:
            output = [*output, *(dice.randrange(VOCAB) for _ in range(dice.randint(1, 3)))]
        start = dice.randint(
            0,
            next(
                (i for i, (a, b) in enumerate(zip(follower._fed, output, strict=False)) if a != b),
                min(len(follower._fed), len(output)),
            ),
        )
        assert ids_of(follower.allowed(start, output[start:])) == ids_of(fresh(name).allowed(0, output)), output


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_may_end_exactly_where_it_is_whole(name: str) -> None:
    form, dice, ends = FORMS[name], random.Random(name), 0
    for _ in range(6):
        text: list[int] = []
        while len(text) < 150:
            allowed = ids_of(fresh(name).allowed(0, text))
            if EOS in allowed:
                ends += 1
                assert form.is_met(tokenizer().decode(text))
            if allowed == [EOS]:
                assert ids_of(fresh(name).allowed(0, [*text, EOS])) == [EOS]
                break
            text.append(dice.choice([i for i in allowed if i != EOS]))
        else:
            pytest.fail("it goes on for ever")
    assert ends >= 6


def test_stop_ids_end_an_answer_too() -> None:
    stop, text = 1, tokenizer().encode("no")
    follower = fresh("choice", (EOS, stop))
    assert stop not in ids_of(follower.allowed(0, []))
    assert {EOS, stop} < set(ids_of(follower.allowed(0, text)))  # "no idea" goes on
    assert follower.prune(0, text, Draft((stop, 5))) == Draft((stop,))
    assert follower.prune(0, [], Draft((stop,))) == Draft(())


@settings(max_examples=15, deadline=None)
@given(name=st.sampled_from(NAMES), seed=st.integers(0, 10**6))
def test_pruning_leaves_what_is_allowed_and_nothing_else(name: str, seed: int) -> None:
    dice = random.Random(seed)
    text = walk(name, 12, dice)
    known = dice.randint(0, len(text))
    true, output = [*text[known:], EOS], text[:known]
    drafts = [
        Draft((*true[: dice.randint(0, 4)], dice.randrange(VOCAB), *true[5:7])),
        random_tree(true, 12, VOCAB, dice),
    ]
    for draft in drafts:
        kept = fresh(name).prune(0, output, draft)
        if draft.probes:
            assert kept == draft
            continue
        assert sorted(paths(kept)) == sorted(path for path in paths(draft) if is_allowed(name, output, path))


def paths(draft: Draft) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for node, token in enumerate(draft.tokens):
        parent = node - 1 if draft.is_chain else draft.parents[node]
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def is_allowed(name: str, output: list[int], path: Seq[int]) -> bool:
    for i, token in enumerate(path):
        if EOS in path[:i] or token not in ids_of(fresh(name).allowed(0, [*output, *path[:i]])):
            return False
    return True


def engine_of(sequences: Seq[tuple[str | None, list[int], Sampling]], **options: Any) -> Sampler:
    """A target's sampler whose slots hold a prompt of two tokens and some output each."""
    slots = SlotTable(len(sequences), 64, 4)
    grammars = SlotGrammars(slots, VOCAB, (EOS,), words)
    new = [
        NewSequence(slot, [1, 7, *output], 2, replaced(sampling, name))
        for slot, (name, output, sampling) in enumerate(sequences)
    ]
    for each in new:
        slots._join(each)
    sampler = Sampler(slots, VOCAB).with_grammars(GrammarMasks(slots, grammars))
    sampler.expect(new)
    return sampler


def replaced(sampling: Sampling, name: str | None) -> Sampling:
    import msgspec

    return msgspec.structs.replace(sampling, grammar=None if name is None else FORMS[name].grammar)


def said(sampler: Sampler, slot: int, logits_of: Any) -> int:
    """Choose one token behind all that is known of a slot."""
    at = int(sampler.slots.known_len[slot])
    logits = logits_of(tuple(sampler.slots.tokens[slot, :at].tolist()))
    return int(sampler.sample(logits[None], np.array([slot]), np.array([at]))[0])


def logits_of(history: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash(history) % 2**31)
    return torch.randn(VOCAB, generator=generator) * 2


OPTIONS = (
    Sampling(3, 0.0),
    Sampling(4, 1.0),
    Sampling(5, 0.8, repetition_penalty=1.3, frequency_penalty=0.2),
    Sampling(6, 1.0, top_k=20, top_p=0.9),
    Sampling(7, 1.0, stop_ids=(EOS,), min_tokens=1),
)


@settings(max_examples=15, deadline=None)
@given(names=st.lists(st.sampled_from([*NAMES, None]), min_size=1, max_size=3), seed=st.integers(0, 10**6))
def test_a_draft_is_sampled_as_token_by_token(names: list[str | None], seed: int) -> None:
    dice = random.Random(seed)
    sequences = [(name, walk(name, dice.randint(0, 6), dice) if name else [], dice.choice(OPTIONS)) for name in names]
    plain, drafting = engine_of(sequences), engine_of(sequences)
    truth: list[list[int]] = []
    for slot, (_, output, _) in enumerate(sequences):
        tokens: list[int] = []
        while len(tokens) < 16 and tokens[-1:] not in ([EOS], [-1]):
            tokens.append(said(plain, slot, logits_of))
            plain.slots.tokens[slot, 2 + len(output) + len(tokens) - 1] = tokens[-1]
            plain.slots.known_len[slot] += 1
        truth.append(tokens)
    for _ in range(3):
        drafts = [a_draft(true, dice) for true in truth]
        for draft, emitted, true in zip(drafts, judged(drafting, drafts), truth, strict=True):
            end = min(len(emitted), len(true))  # what lies behind the end is nobody's
            assert emitted[:end] == true[:end], draft
            assert end


def a_draft(true: list[int], dice: random.Random) -> Draft:
    if dice.random() < 0.5:
        return random_tree([token for token in true if token >= 0], 8, VOCAB, dice)
    right = [token for token in true[: dice.randint(0, 4)] if token >= 0]
    return Draft((*right, *(dice.randrange(VOCAB) for _ in range(dice.randint(0, 2)))))


def judged(sampler: Sampler, drafts: Seq[Draft]) -> list[list[int]]:
    """Return what each slot would emit, with logits that depend on the path to each node."""
    slots = sampler.slots
    layouts = []
    for slot, draft in enumerate(drafts):
        slots.write_draft(slot, draft.tokens)
        known = slots.tokens[slot, : slots.known_len[slot]].tolist()
        logits = torch.stack([logits_of((*known, *path)) for path in [(), *paths(draft)]])
        index = np.array([len(known) + len(path) for path in [(), *paths(draft)]])
        layouts.append((logits, np.full(len(index), slot), index))
    logits_NV, slots_N, index_N = (
        torch.cat([each[0] for each in layouts]),
        *(np.concatenate([each[i] for each in layouts]) for i in (1, 2)),
    )
    counts = np.array([len(each[1]) for each in layouts])
    has_trees = not all(draft.is_chain for draft in drafts)
    rows = [Row(slot, 0, 0, 0) for slot in range(len(drafts))]
    scored = Scored(rows, drafts, counts, logits_NV, slots_N, index_N, has_trees)
    accepted, _ = accept_with_probes(SampleAndMatch(sampler), scored, slots)
    return [emitted for _, emitted in accepted]


def test_the_mask_leaves_no_number_as_it_is() -> None:
    logits_NV = torch.randn(2, VOCAB)
    logits_NV[1, 5] = torch.nan
    bits = np.packbits(np.arange(VOCAB) % 3 == 0, bitorder="little")
    found_NV = masked(logits_NV, [bits, bits])
    for i in range(VOCAB):
        assert found_NV[0, i] == (logits_NV[0, i] if i % 3 == 0 else -torch.inf)
    assert found_NV[1].isnan().nonzero()[:, 0].tolist() == [5]


def test_a_slot_given_to_another_sequence_starts_afresh() -> None:
    sampler = engine_of([("choice", [], Sampling(0, 0.0))])
    first = said(sampler, 0, logits_of)
    sampler.slots._join(NewSequence(0, [1, 7], 2, replaced(Sampling(0, 0.0), "regex")))
    second = said(sampler, 0, logits_of)
    assert tokenizer().decode([first])[0] in "yn"
    assert is_allowed("regex", [], [second])


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
        sampler._masks.grammars._of(0).compiled = pool.submit(Slow, done)  # type: ignore[arg-type]
        logits_NV = torch.randn(3, VOCAB)
        chosen = sampler.sample(logits_NV, np.arange(3), np.full(3, 2)).tolist()
        done.set()
    assert chosen[0] == -1
    assert "0.3 s" in sampler.failure_reason(0, logits_NV[:1])
    assert is_allowed("choice", [], [chosen[1]])
    assert chosen[2] == int(logits_NV[2].argmax())
    assert sampler.sample(logits_NV, np.arange(3), np.full(3, 2)).tolist() == chosen


class Brittle:
    """Follows a sequence, but not behind what a guess says: there it fails, or does not come back."""

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
def test_what_a_guess_leads_to_fails_nobody(is_slow: bool, prunes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_slots, "STEP_S", 0.5)
    monkeypatch.setattr(grammar_slots, "PRUNE_S", 0.3)
    sequences = [("choice", [], Sampling(0, 0.0)), ("regex", [], Sampling(1, 0.0))]
    sampler, plain = engine_of(sequences), engine_of(sequences)
    grammars, done, guess = sampler._masks.grammars, threading.Event(), Draft((5, 6))
    logits_NV = torch.randn(4, VOCAB)
    with ThreadPoolExecutor(1) as pool:
        grammars._of(0).compiled = pool.submit(Brittle, "choice", done if is_slow else None)  # type: ignore[arg-type]
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
    assert [*sampler.prune(rows, [guess, Draft(())])] == [Draft(()), Draft(())], "it is asked about no more guesses"
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
    sampler = engine_of([("choice", [], Sampling(0, 0.0, allowed_ids=(EOS,)))])
    logits_NV = torch.randn(1, VOCAB)
    assert sampler.sample(logits_NV, np.array([0]), np.array([2])).tolist() == [-1]
    assert "no token is left" in sampler.failure_reason(0, logits_NV)
    assert isinstance(failure(sampler.failure_reason(0, logits_NV)), InvalidRequestError)
    assert "NaN" in sampler.failure_reason(0, logits_NV * torch.nan)
