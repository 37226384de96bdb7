"""The same tokens from `transformers`, one process and a worker group, with every source of drafts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster import assemble
from cluster.transport.process_workers import ProcessWorkerGroup
from protos.messages import Request, Sampling
from protos.sampling import SamplingParams
from runtime.core.controller import LocalInbox
from tests.support.distributed.bodies import PATIENT
from tests.support.distributed.engine import Engine, Models, configure, over, tiny_pair
from tests.support.identity import Reference, assert_identical

FAMILIES = ("llama", "qwen3", "gemma2", "phi3", "opt", "gpt2", "gpt_oss", "mixtral", "deepseek_v3")
"""Tiny models with four heads for four ranks, and a vocabulary of 97, which they cannot divide."""
GUESSES = 3
ROOM: dict[str, Any] = {"max_num_seqs": 6, "max_num_batched_tokens": 40, "num_gpu_blocks_override": 160}
START_S = 300.0
"""A timeout for many processes that load torch on few processors."""
Outputs = dict[str, list[int]]


@dataclass(frozen=True)
class Size:
    requests: int
    tokens: int


QUICK, FULL = Size(requests=4, tokens=16), Size(requests=10, tokens=40)


def requests(size: Size) -> list[Request]:
    """Return greedy and seeded requests by turns, with repetitive prompts of different lengths, longer than a step."""
    return [
        Request(
            request_id=str(i),
            params=SamplingParams(),
            max_tokens=size.tokens + i,
            sampling=Sampling(seed=100 + i, temperature=0.0) if i % 2 else Sampling(100 + i, 0.9, top_p=0.95),
            prompt_token_ids=tuple([7, 11 + i, 30, 31 + i] * (2 + i) + [5] * (i % 3)),
        )
        for i in range(size.requests)
    ]


def speculations(models: Models) -> dict[str, dict[str, Any] | None]:
    """The source of drafts: none, n-grams of the text so far, or a draft model on its own worker."""
    return {
        "off": None,
        "ngram": {"method": "ngram", "num_speculative_tokens": GUESSES, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
        "draft": {"method": "draft_model", "model": str(models[1]), "num_speculative_tokens": GUESSES},
    }


def arguments(speculative: dict[str, Any] | None, ranks: int) -> dict[str, Any]:
    if ranks and speculative and "model" in speculative:
        speculative = {**speculative, "placement": "dedicated"}
    split = {"tensor_parallel_size": ranks} if ranks else {}
    return {"speculative_config": speculative, "num_threads": 1, **ROOM, **split}


def run(engine: Engine, size: Size, name: str) -> Outputs:
    """Run all requests to the end; check that drafts were proposed if expected."""
    try:
        engine.put(*requests(size))
        engine.step()
        engine.until(lambda: not engine.built.controller.scheduler.num_unfinished, START_S)
    finally:
        engine.built.shutdown()
    assert not any(reason == "error" for reason in engine.reasons.values()), engine.reasons
    if name == "off":
        assert engine.proposed() == 0
    else:
        assert engine.proposed() > engine.accepted > 0, name
    return engine.outputs


def alone(models: Models, speculative: dict[str, Any] | None) -> Engine:
    config = configure(models, draft=False, **arguments(speculative, 0))
    return Engine(assemble.build(config, LocalInbox(), report=lambda line: None))


def together(models: Models, speculative: dict[str, Any] | None, ranks: int) -> Engine:
    return over(ProcessWorkerGroup(PATIENT), configure(models, draft=False, **arguments(speculative, ranks)))


@dataclass(frozen=True)
class Wanted:
    """The outputs of `transformers` for the greedy requests, and of one process for all."""

    size: Size
    reference: Reference
    outputs: Outputs

    def check(self, outputs: Outputs) -> None:
        """Check for the same ids; near ties are allowed in greedy rows only."""
        greedy = [request for request in requests(self.size) if request.sampling.temperature == 0.0]
        prompts = [request.prompt_token_ids for request in greedy]
        assert_identical(
            prompts,
            [outputs[request.request_id] for request in greedy],
            [self.outputs[request.request_id] for request in greedy],
            self.reference,
        )
        for request in requests(self.size):
            if request.sampling.temperature:
                assert outputs[request.request_id] == self.outputs[request.request_id], request.request_id


def wanted(models: Models, size: Size) -> Wanted:
    """Compare one process without drafts with `transformers`; return its outputs."""
    reference = Reference(models[0])
    found = Wanted(size, reference, run(alone(models, None), size, "off"))
    theirs = {
        request.request_id: reference.greedy(request.prompt_token_ids, request.max_tokens)
        for request in requests(size)
        if request.sampling.temperature == 0.0
    }
    Wanted(size, reference, {**found.outputs, **theirs}).check(found.outputs)
    return found


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_two_ranks_and_a_draft_say_what_transformers_says(family: str, tmp_path: Path) -> None:
    models = tiny_pair(tmp_path, family)
    said = wanted(models, QUICK)
    said.check(run(together(models, speculations(models)["draft"], 2), QUICK, "draft"))


@pytest.mark.full
@pytest.mark.timeout(0)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_returns_the_same_tokens_however_it_is_split_and_drafted(family: str, tmp_path: Path) -> None:
    models = tiny_pair(tmp_path, family)
    said = wanted(models, FULL)
    for name, speculative in speculations(models).items():
        if name != "off":
            said.check(run(alone(models, speculative), FULL, name))
        for ranks in (1, 2, 4):
            said.check(run(together(models, speculative, ranks), FULL, name))
            print(f"{family}, {ranks} rank(s), {name}: the same")
