"""The distribution under rejection sampling of requests that share a seed: drafts that are an earlier answer with it.

The noise of a position is hashed from the seed, so such an answer would tell what noise verifies it.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protos.sampling import SamplingParams
from slipstream import LLM
from tests.support.exactness.statistics import compare
from tests.support.models import tiny_models

IDS = tuple(range(10, 16))
ASKED, LATER = (20, 9, 30), (20, 33, 30)
"""Two prompts of one length."""
SEEDS = 4096


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("llama", tmp_path_factory.mktemp("target"))


@pytest.fixture(params=["standard", "block"])
def engine(request: pytest.FixtureRequest, target: Path) -> Iterator[LLM]:
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "policy": "fixed"}
    made = LLM(
        model=str(target),
        speculative_config=ngram | {"rejection_sample_method": request.param},
        enforce_eager=True,
        skip_tokenizer_init=True,
        num_threads=1,
        seed=0,
        max_num_seqs=64,
        max_logprobs=-1,
    )
    yield made
    made.shutdown()


def answers(engine: LLM, prompts: Sequence[tuple[int, ...]], params: Sequence[SamplingParams]) -> list[tuple[int, ...]]:
    asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return [tuple(one.outputs[0].token_ids) for one in engine.generate(asked, params, use_tqdm=False)]


def distributions(engine: LLM, prompts: Sequence[tuple[int, ...]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return p of `IDS` after each prompt, from the log-probabilities that the target gives."""
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1, detokenize=False)
    found = []
    for one in engine.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False):
        assert one.outputs[0].logprobs is not None
        (first,) = one.outputs[0].logprobs
        found.append([first[token].logprob for token in IDS])
    p_CV: np.ndarray[Any, np.dtype[np.float64]] = np.exp(found)
    return p_CV / p_CV.sum(1, keepdims=True)


def test_an_earlier_answer_with_the_same_seed_as_draft(engine: LLM) -> None:
    """With one noise for both, p is 7e-27 under each rule."""
    common: dict[str, Any] = {
        "temperature": 1.0,
        "allowed_token_ids": list(IDS),
        "ignore_eos": True,
        "detokenize": False,
    }
    earlier = answers(
        engine, [ASKED] * SEEDS, [SamplingParams(seed=seed, max_tokens=4, **common) for seed in range(SEEDS)]
    )
    params = [SamplingParams(seed=i, max_tokens=2, prediction=one, **common) for i, one in enumerate(earlier)]
    later = np.array(answers(engine, [LATER] * SEEDS, params)) - IDS[0]
    p_CV = distributions(engine, [LATER, *((*LATER, token) for token in IDS)])
    counts_CV = np.zeros(p_CV.shape, np.int64)
    np.add.at(counts_CV, (0, later[:, 0]), 1)
    np.add.at(counts_CV, (1 + later[:, 0], later[:, 1]), 1)
    assert engine.stats().accepted > SEEDS / 4
    finding = compare(counts_CV, p_CV)
    assert not finding.is_wrong(2), finding
