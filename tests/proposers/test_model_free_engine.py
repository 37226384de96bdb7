"""Model-free proposers in an engine, on the demo target: the tokens are those without drafts."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from proposers import registry
from proposers.shared import datastore
from slipstream import LLM, SamplingParams
from tests.conftest import ModelPair
from tests.support import identity
from tests.support.policies import always

REPOSITORY = Path(__file__).parents[2]
NUM_PROMPTS, TOKENS = 16, 36
TIGHT = {"block_size": 4, "num_gpu_blocks_override": 360}
"""Few enough blocks that 16 sequences cannot all stay."""

METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "suffix": {"method": "suffix"},
    "suffix tree": {"method": "suffix", "num_speculative_tokens": 8, "draft_shape": "tree"},
    "rest": {"method": "rest", "num_speculative_tokens": 8, "draft_shape": "chain"},
    "rest tree": {"method": "rest"},
    "lookahead": {"method": "lookahead", "lookahead_window": 4, "lookahead_ngram": 4, "lookahead_guesses": 4},
    "cascade": {"method": ["suffix", "ngram"], "num_speculative_tokens": 6, "prompt_lookup_min": 2},
    "cascade with a draft": {"method": ["suffix", "draft_model"], "num_speculative_tokens": 4},
}


@cache
def tokenizer(target: Path) -> Tokenizer:
    return Tokenizer.from_file(str(target / "tokenizer.json"))


def ids(target: Path, text: str) -> list[int]:
    found: list[int] = tokenizer(target).encode(text, add_special_tokens=False).ids
    return found


def prompts(target: Path) -> list[list[int]]:
    """Code, some of it twice, so that there is something to find."""
    workload = json.loads((REPOSITORY / "benchmarks" / "workload.json").read_text())
    texts = [entry["prompt"] for entry in workload["single"][:NUM_PROMPTS]]
    return [ids(target, text + text[: len(text) // 2] if i % 2 else text)[-100:] for i, text in enumerate(texts)]


def params(temperature: float) -> list[SamplingParams]:
    """Of different lengths, so that the batch shrinks."""
    penalties = {"repetition_penalty": 1.05, "top_p": 0.95} if temperature else {}
    return [
        SamplingParams(temperature=temperature, seed=i, max_tokens=TOKENS - 2 * (i % 8), ignore_eos=True, **penalties)
        for i in range(NUM_PROMPTS)
    ]


@pytest.fixture(scope="module")
def store(demo_pair: ModelPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rest") / "store"
    files = sorted((REPOSITORY / "protos").glob("*.py"))
    datastore.write(path, [ids(demo_pair.target, file.read_text()) for file in files], b"d" * 32)
    return path


@pytest.fixture(scope="module")
def off(demo_pair: ModelPair) -> dict[float, identity.Run]:
    """The outputs without speculation."""
    runs = {t: identity.generate(demo_pair.target, prompts(demo_pair.target), params(t)) for t in (0.0, 0.7)}
    assert all(run.proposed == 0 for run in runs.values())
    return runs


def test_every_method_beside_the_controller_is_among_them() -> None:
    beside = {name for name in registry.names() if not registry.load(name).on_worker}
    assert beside <= {keys["method"] for keys in METHODS.values() if isinstance(keys["method"], str)}


def keys_of(name: str, pair: ModelPair, store: Path, **more: Any) -> dict[str, Any]:
    keys = {**METHODS[name], **more}
    methods = keys["method"] if isinstance(keys["method"], list) else [keys["method"]]
    if "rest" in methods:
        keys["datastore"] = str(store)
    if "draft_model" in methods:
        keys["model"] = str(pair.draft)
    return keys


def engine(pair: ModelPair, keys: dict[str, Any], **arguments: Any) -> LLM:
    return LLM(
        model=str(pair.target),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        speculative_config=always(keys),
        **arguments,
    )


@pytest.mark.parametrize("name", METHODS)
def test_it_says_the_same(name: str, demo_pair: ModelPair, store: Path, off: dict[float, identity.Run]) -> None:
    """Greedy and seeded, many at once and one at a time; the second pass finds the answers of the first."""
    with engine(demo_pair, keys_of(name, demo_pair, store)) as llm:
        for temperature, wanted in off.items():
            run = identity.collect(llm, prompts(demo_pair.target), params(temperature))
            assert run.outputs == wanted.outputs
            run.assert_speculated()
        for i in (1, 2):
            [output] = identity.collect(llm, [prompts(demo_pair.target)[i]], params(0.7)[i]).outputs
            assert output == off[0.7].outputs[i]


@pytest.mark.parametrize("name", ["suffix tree", "lookahead", "cascade with a draft"])
def test_it_says_the_same_when_preempted(
    name: str, demo_pair: ModelPair, store: Path, off: dict[float, identity.Run]
) -> None:
    with engine(demo_pair, keys_of(name, demo_pair, store), **TIGHT) as llm:
        run = identity.collect(llm, prompts(demo_pair.target), params(0.7))
    assert run.outputs == off[0.7].outputs
    assert run.preemptions > 0
    run.assert_speculated()


@pytest.mark.parametrize("name", ["ngram", "suffix", "lookahead", "cascade with a draft"])
def test_it_says_the_same_when_it_goes_off_and_on_again(
    name: str, demo_pair: ModelPair, store: Path, off: dict[float, identity.Run]
) -> None:
    table = [[1, 4, 4], [5, 9, 0], [10, 16, 4]]
    keys = keys_of(name, demo_pair, store, num_speculative_tokens=24, num_speculative_tokens_per_batch_size=table)
    if name == "lookahead":
        keys["num_speculative_tokens_per_batch_size"] = [[a, b, 24 if k else 0] for a, b, k in table]
    with engine(demo_pair, keys) as llm:
        run = identity.collect(llm, prompts(demo_pair.target), params(0.0))
        changes = llm.stats().speculation_changes
    assert run.outputs == off[0.0].outputs
    assert changes["batch_size_table"] >= 2
    run.assert_speculated()


def test_in_a_cascade_both_supply_drafts(demo_pair: ModelPair, store: Path) -> None:
    """More is proposed than by suffix alone, which leaves rows without a draft; the draft model fills them."""
    one = {"num_speculative_tokens": 4}
    shares = []
    for name in ("suffix", "cascade with a draft"):
        with engine(demo_pair, keys_of(name, demo_pair, store, **one)) as llm:
            run = identity.collect(llm, prompts(demo_pair.target), params(0.0))
            shares.append((run.proposed, run.accepted))
    assert shares[1][0] > shares[0][0] > 0
    assert shares[1][1] > shares[0][1]


def test_a_prediction_is_accepted_where_it_is_right(demo_pair: ModelPair, off: dict[float, identity.Run]) -> None:
    prompt, answer = prompts(demo_pair.target)[0], off[0.0].outputs[0]
    changed = [*answer[:10], answer[10] ^ 1, *answer[11:]]
    accepted = []
    with engine(demo_pair, METHODS["ngram"]) as llm:
        for prediction in (None, changed, answer):
            some = SamplingParams(temperature=0.0, max_tokens=len(answer), ignore_eos=True, prediction=prediction)
            run = identity.collect(llm, [prompt], some)
            assert run.outputs == [answer]
            accepted.append(run.accepted)
    assert accepted[0] < accepted[1] < accepted[2]
    assert accepted[2] >= len(answer) * 3 // 4
