"""Chains whose length depends on their own tokens: the rules keep the target's distribution, by enumeration.

A chain ends after the first token whose probability under the draft is below a threshold, or after K tokens; that token
stays. All chains and all outcomes of small models are added up, as in `test_rejection_math`. The last test leaves the
token out that ended the chain, which must not be done.
"""

from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.rejection_math import EXACT, PAIRS, Pair, Tally, Text, each_pair, joint, on_either_side, whole
from tests.workers.verification.test_rejection_math import CHAIN_RULES, chain_of, probability

THRESHOLDS = (0.25, 0.5, 0.9)


def stopped(pair: Pair, most: int, threshold: float, text: Text = ()) -> Iterator[Text]:
    """Yield every chain that can be drafted: no token follows one whose probability is below *threshold*."""
    if len(text) == most or (text and pair.draft(text[:-1])[text[-1]] < threshold):
        yield text
        return
    for token in np.flatnonzero(pair.draft(text)).tolist():
        yield from stopped(pair, most, threshold, (*text, token))


def outcomes(pair: Pair, rule: str, most: int, threshold: float, *, leaves_out: bool = False) -> Tally:
    """Add up what rounds with such chains emit; *leaves_out*: without the token that ended the chain."""
    target, draft, size = pair
    verify, acceptance_of = CHAIN_RULES[rule]
    tally = Tally(target, size, most + 1)
    for tokens in stopped(pair, most, threshold):
        drafted = probability(draft, tokens)
        kept = tokens[:-1] if leaves_out and len(tokens) < most else tokens
        if not kept:
            tally.add(drafted, (), target(()))
            continue
        chains, ids = chain_of(target, draft, kept, size)
        for weight, u_K in on_either_side(acceptance_of(chains)[0].tolist()):
            accepted = verify(chains, u_K[None])
            i = int(accepted.counts_R[0])
            if i == len(kept):
                residual_V = whole(target(kept), 1.0, [], None)
            else:
                residual_L = accepted.residual_RL[0][: len(ids[i])]
                residual_V = whole(target(kept[:i]), float(accepted.scale_R[0]), ids[i], residual_L)
            tally.add(drafted * weight, kept[:i], residual_V)
    return tally


@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("rule", CHAIN_RULES)
@each_pair
def test_a_chain_that_ends_early_keeps_the_targets_distribution(pair: Pair, rule: str, threshold: float) -> None:
    outcomes(pair, rule, 3, threshold).check()


def test_the_chains_have_different_lengths() -> None:
    lengths = {len(tokens) for threshold in THRESHOLDS for tokens in stopped(PAIRS["unlike"], 3, threshold)}
    assert lengths == {1, 2, 3}


@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_without_the_token_that_ended_the_chain_it_would_be_another(rule: str) -> None:
    pair = PAIRS["unlike"]
    tally = outcomes(pair, rule, 3, 0.5, leaves_out=True)
    assert tally.joint.sum() == pytest.approx(1.0, abs=EXACT)
    assert np.abs(tally.joint - joint(pair.target, pair.size, 4)).sum() / 2 > 0.02
