"""Grammars in slots, and sampling under them."""

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch

from protos.grammars.host import GrammarHost
from protos.guidance import matcher
from protos.messages import NewSequence, Sampling
from tests.support.structured import EOS, FORMS, follower_host, vocab_size, words
from workers.sampling.grammar_masks import GrammarMasks
from workers.sampling.grammar_slots import FollowLimits, SlotGrammars
from workers.sampling.matcher import Bits, GrammarMatcher
from workers.sampling.sampler import Sampler
from workers.slots import SlotTable

VOCAB = vocab_size()
NAMES = sorted(FORMS)


def fresh(name: str, endings: Seq[int] = (EOS,)) -> GrammarMatcher:
    return GrammarMatcher(matcher(FORMS[name].grammar, words()), VOCAB, endings)


def ids_of(bits: Bits) -> list[int]:
    return np.flatnonzero(np.unpackbits(bits, count=VOCAB, bitorder="little")).tolist()


def is_allowed(name: str, output: list[int], path: Seq[int]) -> bool:
    for i, token in enumerate(path):
        if EOS in path[:i] or token not in ids_of(fresh(name).allowed(0, [*output, *path[:i]])):
            return False
    return True


PATIENT = FollowLimits(round_s=60, patience_s=60, draft_s=60, budget_s=60, longest_s=60)


def engine_of(
    sequences: Seq[tuple[str | None, list[int], Sampling]],
    limits: FollowLimits = PATIENT,
    host: GrammarHost | None = None,
) -> Sampler:
    """Return a target's sampler whose slots each hold a prompt of two tokens and some output."""
    slots = SlotTable(len(sequences), 64, 4)
    grammars = SlotGrammars(slots, VOCAB, (EOS,), host or follower_host(), limits)
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
    """Sample the next token of a slot."""
    at = int(sampler.slots.known_len[slot])
    logits = logits_of(tuple(sampler.slots.tokens[slot, :at].tolist()))
    return int(sampler.sample(logits[None], np.array([slot]), np.array([at]))[0])


def logits_of(history: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash(history) % 2**31)
    return torch.randn(VOCAB, generator=generator) * 2
