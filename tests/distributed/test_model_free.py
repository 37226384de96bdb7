"""Model-free proposers in the controller process: two ranks return the tokens of one process without drafts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proposers import registry
from proposers.shared import datastore
from slipstream import SamplingParams
from tests.support import identity
from tests.support.distributed.engine import (
    Models,
    assert_same,
    configure,
    outputs_without_drafts,
    quick_turns,
    requests,
    threaded,
    tiny_pair,
)

WORLD = 2
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "suffix": {"num_speculative_tokens": 6},
    "rest": {"num_speculative_tokens": 6},
    "lookahead": {"num_speculative_tokens": 24, "lookahead_window": 3, "lookahead_ngram": 3, "lookahead_guesses": 3},
}


@pytest.fixture(autouse=True)
def _quick_turns() -> Iterator[None]:
    with quick_turns():
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return tiny_pair(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def plain(models: Models) -> dict[str, list[int]]:
    """The expected outputs of every run."""
    return outputs_without_drafts(models)


def keys(method: str, texts: list[list[int]], folder: Path) -> dict[str, Any]:
    """Return the `speculative_config` of *method*; a datastore is made of *texts*, every seventh token changed."""
    found = {"method": method, **METHODS[method]}
    if method == "rest":
        changed = [[token ^ (i % 7 == 0) for i, token in enumerate(text)] for text in texts]
        datastore.write(folder / "store", changed, bytes(32))
        found["datastore"] = str(folder / "store")
    return found


def test_every_method_beside_the_controller_is_among_them() -> None:
    assert METHODS.keys() == {name for name in registry.names() if not registry.load(name).on_worker}


@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_say_what_one_process_says(
    method: str, models: Models, plain: dict[str, list[int]], tmp_path: Path
) -> None:
    """Return greedy and seeded requests of different lengths, more than run at once."""
    speculative = keys(method, list(plain.values()), tmp_path)
    engine = threaded(configure(models, tensor_parallel_size=WORLD, speculative_config=speculative))
    try:
        engine.put(*requests(4, 20))
        assert_same(engine.finish(), plain)
        assert engine.proposed() > engine.accepted > 0
        assert not engine.drafted, "no worker drafts"
    finally:
        engine.built.shutdown()


@pytest.mark.full
@pytest.mark.parametrize("method", METHODS)
def test_on_ray(method: str, models: Models, tmp_path: Path, ray_cluster: Any) -> None:
    """The whole engine, sixteen rows at once, with two ranks in processes."""
    prompts = [list(request.prompt_token_ids) for request in requests(16)]
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=24 + i % 5, ignore_eos=True, detokenize=False)
        for i in range(len(prompts))
    ]
    off = identity.generate(models[0], prompts, params)
    assert off.proposed == 0
    speculative = keys(method, off.outputs, tmp_path)
    on = identity.generate(
        models[0],
        prompts,
        params,
        speculative_config=speculative,
        tensor_parallel_size=WORLD,
        distributed_executor_backend="ray",
        num_gpu_blocks_override=1200,
        block_size=4,
    )
    assert on.outputs == off.outputs
    on.assert_speculated()
