"""The distribution of the engine's tokens, against one computed with transformers' logits processors.

Joint outcomes of the first two tokens over a vocabulary of 16, one request each. Chi-square at a
false-alarm rate of 1e-6 a test (nine in the full form, so 1e-5 in all), cells pooled to an expectation of 5.
"""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from slipstream import LLM, SamplingParams
from tests.support.identity import perturbed
from tests.support.models.tiny_models import build
from tests.support.policies import always

VOCAB = 16
PROMPT = [3, 9, 5, 9, 3]
SPREAD = 0.1  # of the weights: a distribution with many likely outcomes
FALSE_ALARM = 1e-6
SETTINGS = {
    "top-p and repetition": {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.3},
    "top-k, min-p, presence, frequency": {
        "temperature": 1.3,
        "top_k": 9,
        "min_p": 0.05,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
    },
    "bias and top-p": {"temperature": 1.0, "top_p": 0.7, "logit_bias": {5: 1.5, 7: -2.0}},
}
METHODS = ("off", "ngram", "draft_model")


def expected_distribution(model: torch.nn.Module, setting: dict[str, object], outputs: list[int]) -> np.ndarray:
    """Return p(next | PROMPT + outputs), float64 `[V]`: bias, penalties, temperature, min-p, top-k, top-p."""
    ids = torch.tensor([[*PROMPT, *outputs]])
    with torch.no_grad():
        scores = model(ids, use_cache=False).logits[:, -1].double()
    for token, bias in setting.get("logit_bias", {}).items():
        scores[0, token] += bias
    if "repetition_penalty" in setting:
        scores = RepetitionPenaltyLogitsProcessor(setting["repetition_penalty"])(ids, scores)
    for token, count in Counter(outputs).items():
        scores[0, token] -= setting.get("presence_penalty", 0.0) + count * setting.get("frequency_penalty", 0.0)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(setting["temperature"])])
    if "min_p" in setting:
        warpers.append(MinPLogitsWarper(setting["min_p"]))
    if "top_k" in setting:
        warpers.append(TopKLogitsWarper(setting["top_k"]))
    if "top_p" in setting:
        warpers.append(TopPLogitsWarper(setting["top_p"]))
    return warpers(ids, scores)[0].softmax(-1).numpy()


def joint_distribution(model: torch.nn.Module, setting: dict[str, object]) -> np.ndarray:
    """Return the distribution of the first two tokens, `[V, V]`."""
    first = expected_distribution(model, setting, [])
    return np.stack(
        [first[a] * expected_distribution(model, setting, [a]) if first[a] else np.zeros(VOCAB) for a in range(VOCAB)]
    )


def p_value(counts: np.ndarray, distribution: np.ndarray) -> float:
    """Return the chi-square p-value, cells pooled to an expectation of at least 5."""
    expected = distribution * counts.sum()
    assert counts[expected == 0].sum() == 0, "something was emitted that has no probability"
    large = expected >= 5
    observed = [*counts[large], counts[~large].sum()]
    wanted = [*expected[large], expected[~large].sum()]
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, wanted, strict=True) if e > 0)
    return float(chi2.sf(statistic, sum(e > 0 for e in wanted) - 1))


def speculation(method: str, draft: Path) -> dict[str, object] | None:
    configs: dict[str, dict[str, object] | None] = {
        "off": None,
        "ngram": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 2},
        "draft_model": {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2},
    }
    return configs[method]


def check_distribution(folder: Path, method: str, names: list[str], draws: int) -> None:
    model = build("llama", folder / "target", vocab_size=VOCAB, spread=SPREAD)
    draft = perturbed(model, folder / "draft", scale=0.2)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with LLM(
        model=str(model),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        seed=11,
        max_num_seqs=256,
        block_size=4,
        speculative_config=always(speculation(method, draft)),
    ) as llm:
        for name in names:
            setting = SETTINGS[name]
            params = SamplingParams(max_tokens=3, ignore_eos=True, **setting)
            before = llm.stats()
            results = llm.generate([{"prompt_token_ids": PROMPT}] * draws, params, use_tqdm=False)
            counts = np.zeros((VOCAB, VOCAB))
            for result in results:
                first, second, _ = result.outputs[0].token_ids
                counts[first, second] += 1
            assert p_value(counts, joint_distribution(reference, setting)) > FALSE_ALARM, (method, name)
            proposed, accepted = (getattr(llm.stats(), key) - getattr(before, key) for key in ("proposed", "accepted"))
            assert (proposed > accepted > 0) if method != "off" else proposed == 0


@pytest.mark.parametrize("method", METHODS)
def test_the_emitted_distribution_is_the_targets(method: str, tmp_path: Path) -> None:
    check_distribution(tmp_path, method, [list(SETTINGS)[METHODS.index(method)]], draws=1500)


@pytest.mark.full
@pytest.mark.parametrize("method", METHODS)
def test_the_emitted_distribution_is_the_targets_in_full(method: str, tmp_path: Path) -> None:
    check_distribution(tmp_path, method, list(SETTINGS), draws=20_000)


def test_the_check_would_notice_a_tilted_distribution(tmp_path: Path) -> None:
    model = build("llama", tmp_path / "target", vocab_size=VOCAB, spread=SPREAD)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    distribution = joint_distribution(reference, SETTINGS["top-p and repetition"])
    tilted = distribution**1.2 / (distribution**1.2).sum()
    counts = np.random.default_rng(0).multinomial(20_000, tilted.ravel() / tilted.sum()).reshape(distribution.shape)
    assert p_value(counts.astype(float), distribution) < FALSE_ALARM
