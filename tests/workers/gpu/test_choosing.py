"""Sampling and acceptance of graphs equal their definitions on the host."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.draft import Draft
from protos.messages import Row
from workers.gpu.choosing import SAMPLER_KINDS, accepted, choose, sampler_kind
from workers.gpu.kernels.sampling import KernelLimits, sample_tokens
from workers.gpu.sizes import LINE, SamplerKind
from workers.gpu.verdicts import tree_verdict, verdicts_of
from workers.sampling.noise import row_keys
from workers.sampling.sample import DeviceLimits, SamplingLimits, greedy, sample
from workers.verification.acceptance import accept

ROWS, VOCAB = 12, 61


def some_limits(kind: SamplerKind) -> SamplingLimits:
    """Return the limits of rows of every kind that *kind* is for, greedy ones among them."""
    temperature = np.zeros(ROWS, np.float32)
    top_k, top_p, min_p = np.zeros(ROWS, np.int64), np.ones(ROWS), np.zeros(ROWS)
    if kind != "greedy":
        temperature[::2] = np.linspace(0.3, 1.7, ROWS // 2)
        temperature[1] = 1e-6
    if kind == "limited":
        top_k[::3], top_p[::4], min_p[::6] = 7, 0.8, 0.05
    return SamplingLimits(temperature, top_k, top_p, min_p)


def on_device(limits: SamplingLimits) -> DeviceLimits:
    fields = (limits.temperature, limits.top_k, limits.top_p, limits.min_p)
    return DeviceLimits(*(torch.from_numpy(field) for field in fields))


def some_logits(step: float) -> torch.Tensor:
    """Return logits with ties, an infinite row and a NaN."""
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(3)) * 3
    logits = (logits / step).round() * step
    logits[2, :30] = -torch.inf
    logits[4] = -torch.inf
    logits[6, 5] = torch.nan
    logits[7, 5] = torch.nan
    return logits


@pytest.mark.parametrize("step", [1e-3, 1.0])
@pytest.mark.parametrize("kind", SAMPLER_KINDS)
def test_ids_are_those_of_the_definition(kind: SamplerKind, step: float, monkeypatch: pytest.MonkeyPatch) -> None:
    limits, logits = some_limits(kind), some_logits(step)
    keys = torch.from_numpy(row_keys(np.arange(ROWS) * 977, np.arange(ROWS)))
    expected = greedy(logits)
    for row in np.flatnonzero(limits.temperature >= 1e-5).tolist():
        at = np.array([row])
        expected[row] = sample(logits[row : row + 1], keys[row : row + 1], limits.at(at))[0]
    assert sampler_kind(limits) == kind
    assert torch.equal(choose(kind, logits, keys, on_device(limits)), expected)
    monkeypatch.setattr("workers.sampling.sample.MAX_LOGITS", 5 * VOCAB)
    assert torch.equal(choose(kind, logits, keys, on_device(limits)), expected)
    assert expected[4] == expected[6] == expected[7] == -1


@pytest.mark.parametrize("step", [1e-3, 1.0])
@pytest.mark.parametrize("kind", SAMPLER_KINDS)
def test_kernels_give_the_same_ids(kind: SamplerKind, step: float, monkeypatch: pytest.MonkeyPatch) -> None:
    limits, logits = on_device(some_limits(kind)), some_logits(step)
    keys = torch.from_numpy(row_keys(np.arange(ROWS) * 977, np.arange(ROWS)))
    expected = choose(kind, logits, keys, limits)
    started: list[torch.Tensor] = []

    def counted(logits_NV: torch.Tensor, keys_N: torch.Tensor, given: KernelLimits) -> torch.Tensor:
        started.append(sample_tokens(logits_NV, keys_N, given))
        return started[-1]

    monkeypatch.setattr("workers.gpu.choosing.has_kernels", lambda _device: True)
    monkeypatch.setattr("workers.gpu.kernels.sampling.sample_tokens", counted)
    assert torch.equal(choose(kind, logits, keys, limits), expected)
    assert len(started) == 1


@st.composite
def drafts(draw: st.DrawFn) -> tuple[list[int], Draft]:
    """Return the target's tokens, and a chain or tree of at most 7 nodes, siblings of equal tokens included."""
    size = draw(st.integers(0, 7))
    tokens = tuple(draw(st.lists(st.integers(0, 2), min_size=size, max_size=size)))
    parents = tuple(draw(st.integers(-1, node - 1)) for node in range(size))
    sampled = draw(st.lists(st.integers(-1, 2), min_size=8, max_size=8))
    return sampled, Draft(tokens, draw(st.sampled_from([(), parents])))


@settings(max_examples=50, deadline=None)
@given(st.lists(drafts(), min_size=1, max_size=4))
def test_drafts_are_accepted_as_on_the_host(rows: list[tuple[list[int], Draft]]) -> None:
    def padded(values: list[int], fill: int) -> list[int]:
        return values + [fill] * (8 - len(values))

    found = accepted(
        torch.tensor([sampled for sampled, _ in rows]),
        torch.tensor([padded([9, *draft.tokens], 0) for _, draft in rows]),
        torch.tensor([padded([0, *(parent + 1 for parent in draft.node_parents())], 0) for _, draft in rows]),
        torch.tensor([len(draft) for _, draft in rows], dtype=torch.int32),
    ).tolist()
    for (sampled, draft), nodes in zip(rows, found, strict=True):
        line = [*sampled, nodes, *padded([], 0)]
        found_path = list(tree_verdict(0, draft, line, 8).path)
        assert found_path == usable(draft, sampled)
        if draft.is_chain:
            assert nodes.bit_count() == nodes.bit_length() == len(accept(draft, sampled))


def usable(draft: Draft, sampled: list[int]) -> list[int]:
    """Return the path of the definition, without a last node after which there is no token; none if the row fails."""
    path = accept(draft, sampled)
    if sampled[0] == -1:
        return []
    return path[:-1] if path and sampled[path[-1] + 1] == -1 else path


def test_64_draft_tokens_fit_a_word() -> None:
    tokens = torch.arange(65)[None]
    parents = (torch.arange(65) - 1).clamp_min(0)[None]
    sampled = torch.cat((tokens[:, 1:], torch.tensor([[9]])), 1)
    nodes = accepted(sampled, tokens, parents, torch.tensor([64])).item()
    line_X = np.zeros(LINE * 65, np.int64)
    line_X[:65], line_X[65] = sampled[0].numpy(), nodes
    verdict = verdicts_of([Row(0, 4, 1, 5)], np.array([64]), {}, line_X[None])[0]
    assert list(verdict.path) == list(range(64))
