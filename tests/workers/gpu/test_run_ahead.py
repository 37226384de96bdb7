"""Plain rounds that are launched before their plan: the same tokens, whatever the next plan is."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from slipstream import SamplingParams
from tests.support.gpu.engine import Served, only, serve
from tests.support.gpu.machine import interpreted_kernels, pretended_gpu
from tests.support.identity import generate
from tests.support.models.tiny_models import build, perturb
from workers.gpu.choosing import choose
from workers.gpu.sizes import SamplerKind
from workers.sampling.noise import row_keys

SEED = 5
PROMPTS = [[3, 5, 9, 11], [8, 4, 4], [7, 7, 60, 2, 9, 31], [12, 3]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("model") / "target", num_hidden_layers=2, spread=0.2)


def lengths(*lengths: int, **options: Any) -> list[SamplingParams]:
    """Return parameters of requests that end after so many tokens; every other one draws."""
    drawn = [{"temperature": 0.0}, {"temperature": 1.0, "seed": SEED}]
    return [
        SamplingParams(max_tokens=length, ignore_eos=True, **{**drawn[r % 2], **options})
        for r, length in enumerate(lengths)
    ]


def run(model: Path, params: list[SamplingParams], **options: Any) -> Served:
    """Return what an engine with graphs does; its tokens are those of an ordinary one."""
    prompts = PROMPTS[: len(params)]
    options = {"max_num_seqs": 4, **options}
    with pretended_gpu() as machine, only(4, "greedy", "drawn"):
        served = serve(machine, model, prompts, params, **options)
    assert served.outputs == generate(model, prompts, params, max_model_len=64).outputs
    return served


def launches(served: Served) -> list[int]:
    """Return how many graphs the rounds launched in which all rows decode."""
    return [counts.graphs for plan, counts in served.rounds if plan.decodes]


def is_ahead(served: Served) -> list[bool]:
    """Return which of these rounds were running already when their plan came."""
    continued = [plan.continues for plan, _ in served.rounds if plan.decodes]
    return [False, *continued[:-1]]


def test_rounds_that_continue_are_launched_one_ahead(target: Path) -> None:
    """The plan says which rows end for certain, so no round is launched in vain."""
    served = run(target, lengths(4, 12, 14))
    assert sum(launches(served)) == len(launches(served))
    assert is_ahead(served) == [False] + [True] * (len(launches(served)) - 1)
    assert {len(plan.rows) for plan, _ in served.rounds if plan.decodes} == {1, 2, 3}
    for plan, counts in served.rounds:
        if plan.decodes:
            assert (counts.kernels.total(), counts.blocking.total(), counts.syncs.total()) == (0, 0, 1)


def test_rows_that_end_by_a_token_leave_the_others_running(target: Path) -> None:
    """Their end is not known when the next round is launched, which computes one more token for them in vain."""
    params = lengths(14, 14, 14)
    stops = [ids[5] for ids in generate(target, PROMPTS[:3], params, max_model_len=64).outputs]
    served = run(target, [*(replace(params[r], stop_token_ids=[stops[r]]) for r in range(2)), params[2]])
    assert {len(ids) for ids in served.outputs[:2]} != {14}
    assert sum(launches(served)) == len(launches(served))


@pytest.mark.parametrize("slots", [2, 3])
def test_waiting_requests_start_when_a_row_ends(target: Path, slots: int) -> None:
    served = run(target, lengths(4, 9, 5, 7), max_num_seqs=slots)
    assert sum(launches(served)) == len(launches(served))
    assert 0 < sum(is_ahead(served)) < len(launches(served))


def test_without_room_for_the_next_tokens_rounds_wait_for_their_plan(target: Path) -> None:
    """Blocks of 4 tokens: of four rows that run, some need another one most of the time, and there are none."""
    served = run(target, lengths(14, 14, 14, 14), block_size=4, num_gpu_blocks_override=16)
    plans = [plan for plan, _ in served.rounds]
    assert any(plan.new for plan in plans[4:])  # preempted, and begun again
    assert {plan.continues for plan in plans if plan.decodes} == {True, False}
    assert sum(launches(served)) == len(launches(served))


def test_a_round_that_is_not_what_the_plan_asks_for_is_left(target: Path, tmp_path: Path) -> None:
    """Draft tokens come back with the last row, by the table; the plain round that runs by then is of no use."""
    speculative = {
        "method": "draft_model",
        "model": str(perturb(target, tmp_path / "draft", noise=0.04)),
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 4, 0]],
    }
    served = run(target, lengths(6, 16), speculative_config=speculative)
    assert served.proposed > 0
    plain = [(plan, counts) for plan, counts in served.rounds if plan.decodes and not plan.speculates]
    drafting = [counts.graphs for plan, counts in served.rounds if plan.decodes and plan.speculates]
    assert sum(counts.graphs for _, counts in plain) == len(plain) + 1
    assert set(drafting[:-1]) == {2}


def test_a_row_without_a_token_fails_alone(target: Path) -> None:
    """The round after it is running by then, and has no token to feed."""
    (key,) = row_keys(np.array([SEED]), np.array([len(PROMPTS[1]) + 4])).tolist()

    def choose_none_once(kind: SamplerKind, logits: torch.Tensor, keys: torch.Tensor, *rest: Any) -> torch.Tensor:
        return torch.where(keys == key, -1, choose(kind, logits, keys, *rest))

    with pretended_gpu() as machine, only(4, "drawn"), mock.patch("workers.gpu.target_step.choose", choose_none_once):
        served = serve(machine, target, PROMPTS[:3], lengths(12, 12, 12), max_num_seqs=4)
    whole = generate(target, PROMPTS[:3], lengths(12, 12, 12), max_model_len=64).outputs
    assert served.outputs == [whole[0], whole[1][:4], whole[2]]
    assert sum(is_ahead(served)) == len(launches(served)) - 1


def test_penalties_count_tokens_that_the_host_does_not_know(target: Path) -> None:
    options = {"presence_penalty": 2.0, "frequency_penalty": 1.0, "repetition_penalty": 1.3}
    params = [*lengths(7, 6, **options), *lengths(5)]
    with pretended_gpu() as machine, interpreted_kernels(), only(4, "drawn"):
        served = serve(machine, target, PROMPTS[:3], params, max_num_seqs=4, max_num_batched_tokens=32)
    assert served.outputs == generate(target, PROMPTS[:3], params, max_model_len=64).outputs
    assert served.outputs != generate(target, PROMPTS[:3], lengths(7, 6, 5), max_model_len=64).outputs
    assert sum(is_ahead(served)) == len(launches(served)) - 1
    assert sum(launches(served)) == len(launches(served))


def test_async_scheduling_can_be_switched_off(target: Path) -> None:
    served = run(target, lengths(5, 6), async_scheduling=False)
    assert not any(plan.continues for plan, _ in served.rounds)
    assert set(launches(served)) == {1}


def test_engines_without_graphs_do_not_run_ahead(target: Path) -> None:
    served = run(target, lengths(5, 6), enforce_eager=True)
    assert not any(plan.continues for plan, _ in served.rounds)
