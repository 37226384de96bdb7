"""Targets with recurrent layers on two ranks, with drafts and prefix hits: the tokens of `transformers`."""

from pathlib import Path
from typing import Any

import pytest

from cluster.transport.process_workers import ProcessWorkerGroup
from protos.messages import Request, Sampling
from protos.sampling import SamplingParams
from tests.distributed.test_identity import START_S, speculations
from tests.support.distributed.bodies import PATIENT
from tests.support.distributed.engine import Engine, configure, over, threaded
from tests.support.identity import Reference, assert_identical, perturbed
from tests.support.models.tiny_models import build
from tests.support.recurrent.tiny_hybrids import SPLIT

COUNT = 14
SHARED = [11, 12, 13, 14, 15, 16, 17, 18, 19]
PROMPTS = [[*SHARED * (i % 2), *[5, 6, 7, 8 + i] * (2 + 2 * i)] for i in range(5)]
ROOM: dict[str, Any] = {"num_gpu_blocks_override": 33, "num_threads": 1}
"""So few blocks that sequences are preempted."""


def requests(prompts: list[list[int]]) -> list[Request]:
    return [
        Request(str(i), tuple(prompt), SamplingParams(), Sampling(seed=i, temperature=0.0), COUNT)
        for i, prompt in enumerate(prompts)
    ]


def say(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    engine.outputs.clear()
    engine.put(*requests(prompts))
    engine.step()
    engine.until(lambda: not engine.built.controller.scheduler.num_unfinished, START_S)
    assert set(engine.reasons.values()) == {"length"}
    return [engine.outputs[str(i)] for i in range(len(prompts))]


def check(engine: Engine, model: Path, *, speculates: bool) -> int:
    """Have two waves of requests served, of which the second continues the first; return the number of preemptions."""
    reference = Reference(model)
    try:
        first = say(engine, PROMPTS)
        assert_identical(PROMPTS, first, [reference.greedy(prompt, COUNT) for prompt in PROMPTS], reference)
        longer = [[*prompt, *said, 3, 4] for prompt, said in zip(PROMPTS, first, strict=True)]
        second = say(engine, longer)
        assert_identical(longer, second, [reference.greedy(prompt, COUNT) for prompt in longer], reference)
        # Which blocks the second wave finds depends on what was evicted; alone, a request finds what it left itself.
        assert say(engine, longer[-1:]) == say(engine, longer[-1:]) == second[-1:]
        stats = engine.built.controller.stats()
    finally:
        engine.built.shutdown()
    assert stats.prefix_hits > 0
    assert (engine.proposed() > 0) == speculates
    return stats.preemptions


def pair(family: str, folder: Path) -> tuple[Path, Path]:
    model = build(family, folder / "target")
    return model, perturbed(model, folder / "draft")


@pytest.mark.parametrize("name", ["off", "ngram", "draft"])
def test_two_ranks(name: str, tmp_path: Path) -> None:
    models = pair("qwen3_next", tmp_path)
    speculative = speculations(models)[name]
    config = configure(models, draft=False, tensor_parallel_size=2, speculative_config=speculative, **ROOM)
    preemptions = check(threaded(config), models[0], speculates=name != "off")
    assert preemptions > 0 or name != "off"


@pytest.mark.full
@pytest.mark.timeout(0)
@pytest.mark.parametrize("family", SPLIT)
def test_two_ranks_in_processes(family: str, tmp_path: Path) -> None:
    models = pair(family, tmp_path)
    for name, given in speculations(models).items():
        speculative = {**given, "placement": "dedicated"} if given and "model" in given else given
        config = configure(models, draft=False, tensor_parallel_size=2, speculative_config=speculative, **ROOM)
        check(over(ProcessWorkerGroup(PATIENT), config), models[0], speculates=name != "off")
