"""What a grammar allows depends on the text alone: the same by drafts, along trees, or token by token."""

import random
from collections.abc import Sequence as Seq

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.draft import Draft
from protos.messages import NewSequence, Row, Sampling
from tests.support.grammar_sampling import NAMES, VOCAB, engine_of, fresh, ids_of, is_allowed, logits_of, replaced, said
from tests.support.structured import EOS, FORMS, tokenizer
from tests.support.tree_proposer import random_tree
from workers.sampling.grammar_masks import masked
from workers.sampling.sampler import Sampler
from workers.verification.acceptance import SampleAndMatch, Scored
from workers.verification.probes import accept_with_probes


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
            end = min(len(emitted), len(true))  # tokens after the end are undefined
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
