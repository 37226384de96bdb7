"""The KV cache is sized by the memory that the largest round takes; kernels run before a worker is ready."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from protos.errors import ConfigError
from slipstream import LLM, SamplingParams
from tests.support.gpu.engine import only
from tests.support.gpu.machine import pretended_gpu
from tests.support.identity import generate
from tests.support.models.tiny_models import build, perturb
from tests.support.policies import always
from workers import build as loading
from workers.gpu.token_counts import TokenCounts
from workers.model.runner import ModelRunner
from workers.rehearsal import Rehearsal
from workers.sampling.sampler import Sampler
from workers.target import TargetWorker

TOTAL, FREE = 1 << 30, 900 << 20
PER_TOKEN, PER_POSITION = 1 << 19, 3 << 20
PROMPTS = [[3, 5, 9, 11], [8, 4, 4]]
K = 3


class Memory:
    """What torch tells of a device whose forwards and sampling take memory by their sizes; *most* is all there is."""

    def __init__(self, most: int = FREE) -> None:
        self.most, self.peak = most, 0
        self.rounds: list[tuple[int, int, int]] = []

    def take(self, num_bytes: int) -> None:
        self.peak = max(self.peak, num_bytes)
        if num_bytes > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def reset(self, _device: object = None) -> None:
        self.peak = 0


@contextlib.contextmanager
def device(memory: Memory) -> Iterator[None]:
    forward, sample, score = ModelRunner._call, Sampler.sample, TargetWorker.score

    def call(runner: ModelRunner, run: Any, batch: Any, *rest: Any) -> Any:
        memory.take(len(batch.tokens_T) * PER_TOKEN)
        return forward(runner, run, batch, *rest)

    def sampled(sampler: Sampler, logits_NV: torch.Tensor, *rest: Any) -> torch.Tensor:
        memory.take(len(logits_NV) * PER_POSITION)
        return sample(sampler, logits_NV, *rest)

    def scored(worker: TargetWorker, rows: Any, drafts: Any, *rest: Any) -> Any:
        memory.rounds.append((len(rows), rows[0].length, len(drafts[0])))
        return score(worker, rows, drafts, *rest)

    with contextlib.ExitStack() as stack:
        for owner, name, fake in (
            (ModelRunner, "_call", call),
            (Sampler, "sample", sampled),
            (TargetWorker, "score", scored),
        ):
            stack.enter_context(mock.patch.object(owner, name, fake))
        stack.enter_context(
            mock.patch.multiple(
                "torch.cuda",
                mem_get_info=lambda _device=None: (FREE, TOTAL),
                reset_peak_memory_stats=memory.reset,
                memory_reserved=lambda _device=None: 0,
                max_memory_reserved=lambda _device=None: memory.peak,
            )
        )
        yield


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    target = build("llama", folder / "target", num_hidden_layers=1, spread=0.2)
    return target, perturb(target, folder / "draft", noise=0.04)


def start(pair: tuple[Path, Path], memory: Memory, rule: str = "coupled", **options: Any) -> tuple[LLM, list[str]]:
    """Return an engine on the pretended device, and what it reported."""
    lines: list[str] = []
    speculative = {"method": "draft_model", "model": str(pair[1]), "num_speculative_tokens": K}
    given: dict[str, Any] = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "skip_self_check": True,
        "device": "cuda",
        "max_model_len": 32,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "speculative_config": always(speculative | {"rejection_sample_method": rule}),
        **options,
    }
    measure = loading.memory_of_steps

    def measured(config: Any, model: Any, taps: Any, report: Any) -> int:
        return measure(config, model, taps, lambda line: (lines.append(line), report(line))[1])

    with mock.patch.object(loading, "memory_of_steps", measured):
        return LLM(model=str(pair[0]), **given), lines


def test_the_peak_of_sampling_and_graphs_are_kept_free(pair: tuple[Path, Path]) -> None:
    memory = Memory()
    with pretended_gpu(), only(4, "greedy"), device(memory):
        with mock.patch.object(loading, "blocks_that_fit", wraps=loading.blocks_that_fit) as fit:
            llm, lines = start(pair, memory)
        sampling = 4 * (1 + K) * PER_POSITION  # more than 64 tokens of prompts
        kept = 2 * sampling + TokenCounts.num_bytes(4, 96)
        assert [call.args[3] for call in fit.call_args_list] == [kept]
        assert loading.cache_bytes(fit.call_args.args[0], fit.call_args.args[1], kept) == (
            int(FREE - (1 - 0.9) * TOTAL) - kept
        )
        assert len(lines) == 1
        assert lines[0].startswith("device memory: of 1.00 GiB, 0.88 are free beside 0.00 of weights; the largest step")
        assert "(4 rows of 1 tokens and 3 draft tokens) takes 0.05, graphs 0.05, caches may take 0.69" in lines[0]
        warmed = set(memory.rounds)
        assert {(4, 1, K), (2, 32, 0), (1, 1, 0), (1, 1, K), (2, 1, 0), (2, 1, K), (1, 4, 0), (1, 16, 0)} <= warmed
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True), use_tqdm=False)
        llm.shutdown()
    plain = generate(pair[0], PROMPTS, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True), max_model_len=32)
    assert [list(each.outputs[0].token_ids) for each in outputs] == plain.outputs


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_rules_of_rejection_sampling_are_warmed_too(pair: tuple[Path, Path], rule: str) -> None:
    memory = Memory()
    with pretended_gpu(), device(memory):
        llm, _ = start(pair, memory, rule, enforce_eager=True)
        llm.shutdown()
    assert (4, 1, K) in memory.rounds


def test_too_little_memory_is_an_error_with_all_sizes(pair: tuple[Path, Path]) -> None:
    with pretended_gpu(), device(memory := Memory()), pytest.raises(ConfigError) as caught:
        start(pair, memory, gpu_memory_utilization=0.2)
    assert "nothing is left for the KV cache: of 1.00 GiB, 0.88 are free beside 0.00 of weights" in str(caught.value)
    assert "gpu_memory_utilization 0.2 keeps 0.80 free; lower max_num_batched_tokens" in str(caught.value)
    with pretended_gpu(), device(memory := Memory(most=40 << 20)), pytest.raises(ConfigError) as caught:
        start(pair, memory)
    largest = Rehearsal(4, 1, K)
    assert str(caught.value).startswith(f"the largest step, {largest}, does not fit beside 0.00 GiB of weights: lower")


def test_a_cache_of_a_given_size_is_not_measured(pair: tuple[Path, Path]) -> None:
    with pretended_gpu(), device(memory := Memory()):
        llm, lines = start(pair, memory, num_gpu_blocks_override=16, enforce_eager=True)
        llm.shutdown()
    assert not lines
