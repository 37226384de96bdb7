"""Rejection sampling of chains, proved by enumeration: all drafts and outcomes of small models are added up."""

from itertools import product

import numpy as np
import pytest
import torch

from tests.support.rejection_math import EXACT, PAIRS, Model, Pair, Tally, Text, each_pair, on_either_side, whole
from workers.verification import rejection_math as rules


def chain_of(target: Model, draft: Model, tokens: Text, width: int) -> tuple[rules.ChainBatch, list[list[int]]]:
    """Return one chain as the rules get it, with the ids of its distributions."""
    shape = (1, len(tokens), width)
    p_RKL, q_RKL, drawn_RK, ids = np.zeros(shape), np.zeros(shape), np.zeros(shape[:2], np.int64), []
    for i, token in enumerate(tokens):
        p_V = draft(tokens[:i])
        own = np.flatnonzero(p_V).tolist()
        p_RKL[0, i, : len(own)], q_RKL[0, i, : len(own)] = target(tokens[:i])[own], p_V[own]
        drawn_RK[0, i] = own.index(token)
        ids.append(own)
    return rules.ChainBatch(np.array([len(tokens)]), p_RKL, q_RKL, drawn_RK), ids


def probability(model: Model, text: Text) -> float:
    """Return the probability of *text* under *model*."""
    return float(np.prod([model(text[:i])[token] for i, token in enumerate(text)]))


CHAIN_RULES = {"standard": (rules.standard, rules.standard_acceptance), "block": (rules.block, rules.block_acceptance)}


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("rule", CHAIN_RULES)
@each_pair
def test_a_chain_keeps_the_targets_distribution(pair: Pair, rule: str, count: int) -> None:
    target, draft, size = pair
    verify, acceptance_of = CHAIN_RULES[rule]
    tally = Tally(target, size, count + 1)
    for tokens in product(range(size), repeat=count):
        drafted = probability(draft, tokens)
        if not drafted:
            continue
        chains, ids = chain_of(target, draft, tokens, size)
        for weight, u_K in on_either_side(acceptance_of(chains)[0].tolist()):
            accepted = verify(chains, u_K[None])
            i = int(accepted.counts_R[0])
            residual_L = accepted.residual_RL[0][: len(ids[i])] if i < count else None
            scale = float(accepted.scale_R[0]) if i < count else 1.0
            residual_V = whole(target(tokens[:i]), scale, ids[i] if i < count else [], residual_L)
            tally.add(drafted * weight, tokens[:i], residual_V)
    tally.check()


def mean_accepted(rule: str, pair: Pair, count: int) -> float:
    """Return how many tokens of a chain are kept on average."""
    target, draft, size = pair
    verify, acceptance_of = CHAIN_RULES[rule]
    total = 0.0
    for tokens in product(range(size), repeat=count):
        drafted = probability(draft, tokens)
        if drafted:
            chains, _ = chain_of(target, draft, tokens, size)
            total += sum(
                drafted * weight * int(verify(chains, u_K[None]).counts_R[0])
                for weight, u_K in on_either_side(acceptance_of(chains)[0].tolist())
            )
    return total


@each_pair
def test_block_keeps_at_least_as_many(pair: Pair) -> None:
    assert mean_accepted("block", pair, 3) >= mean_accepted("standard", pair, 3) - EXACT


def test_block_keeps_more_where_distributions_differ_and_all_where_they_are_equal() -> None:
    unlike, equal = PAIRS["unlike"], PAIRS["equal"]
    assert mean_accepted("block", unlike, 3) > mean_accepted("standard", unlike, 3) + 0.01
    assert mean_accepted("standard", equal, 3) == pytest.approx(3)
    assert mean_accepted("block", equal, 3) == pytest.approx(3)


@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_chains_of_a_batch_do_not_know_of_each_other(rule: str) -> None:
    verify, _ = CHAIN_RULES[rule]
    (target, draft, _), rng = PAIRS["unlike"], np.random.default_rng(3)
    tokens: list[Text] = [(0, 1, 2), (1,), (), (2, 2)]
    alone = [chain_of(target, draft, each, 3)[0] for each in tokens]
    u_RK = rng.random((4, 3))
    filled = [np.zeros((4, 3, 3)), np.zeros((4, 3, 3)), np.zeros((4, 3), np.int64)]
    for r, chain in enumerate(alone):
        for whole_R, own_R in zip(filled, chain[1:], strict=True):
            whole_R[r, : len(tokens[r])] = own_R[0]
    together = verify(
        rules.ChainBatch(np.array([len(each) for each in tokens]), filled[0], filled[1], filled[2].astype(np.int64)),
        u_RK,
    )
    assert together.counts_R[2] == 0
    for r in (0, 1, 3):
        by_itself = verify(alone[r], u_RK[r : r + 1, : len(tokens[r])])
        assert by_itself.counts_R[0] == together.counts_R[r]
        if by_itself.counts_R[0] < len(tokens[r]):
            assert by_itself.scale_R[0] == together.scale_R[r]
            assert (by_itself.residual_RL[0] == together.residual_RL[r]).all()


def test_rounding_that_leaves_nothing_costs_no_token() -> None:
    p_RV = torch.tensor([[0.25, 0.75]], dtype=torch.float64)
    at_M2, residual_M = torch.tensor([[0, 0], [0, 1]]), torch.zeros(2, dtype=torch.float64)
    assert rules.residual(p_RV, torch.ones(1, dtype=torch.float64), at_M2, residual_M).tolist() == p_RV.tolist()


def test_a_token_is_drawn_by_the_noise_given_and_none_where_there_is_none() -> None:
    weights = torch.tensor([[0.0, 1.0, 3.0], [0.0, 2.0, 2.0], [0.0, 0.0, 0.0], [torch.nan, 1.0, 1.0]])
    noise = torch.tensor([[9.0, 2.0, 0.0], [0.0, 0.0, 0.0], [1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])
    assert rules.gumbel_argmax(weights.double(), noise.double()).tolist() == [1, 1, -1, -1]
