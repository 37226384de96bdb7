"""Speculative arguments: vLLM's names, removed names, and refusals that name the argument."""

import json
import logging
from typing import Any

import pytest

from protos.config import arguments
from protos.config.engine import SpeculativeConfig
from protos.config.method import Described
from protos.errors import ConfigError
from tests.support.engine_arguments import parse, refusal, speculative


def test_a_draft_model_and_its_defaults() -> None:
    config = speculative(model="facebook/opt-125m")
    assert (config.method, config.model, config.num_speculative_tokens) == ("draft_model", "facebook/opt-125m", 5)
    assert (config.draft_tensor_parallel_size, config.rejection_sample_method) == (1, "coupled")


@pytest.mark.parametrize(
    "keys",
    [{"model": "ngram"}, {"model": "[ngram]"}, {"method": "ngram"}, {"prompt_lookup_max": 5}, {"method": "ngram_gpu"}],
)
def test_ngram_is_recognised(keys: dict[str, Any]) -> None:
    config = speculative(**keys)
    assert (config.method, config.model) == ("ngram", None)
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (5, 5)


@pytest.mark.parametrize(
    ("keys", "lengths"),
    [
        ({"prompt_lookup_max": 4}, (4, 4)),
        ({"prompt_lookup_min": 2}, (2, 2)),
        ({"prompt_lookup_min": 2, "prompt-lookup-max": 3}, (2, 3)),
    ],
)
def test_one_end_of_the_lookup_range_mirrors_the_other(keys: dict[str, Any], lengths: tuple[int, int]) -> None:
    config = speculative(method="ngram", **keys)
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == lengths


AUTO = ["auto", '"auto"', " Auto ", {"method": "auto"}, '{"method": "auto"}']


@pytest.mark.parametrize("given", AUTO)
def test_auto_is_suffix_under_the_adaptive_policy(given: object) -> None:
    found = arguments.parse({"model": "m", "speculative_config": given}).speculative
    assert found is not None
    assert (found.method, found.model, found.policy_name) == ("suffix", None, "adaptive")


def test_auto_uses_heads_in_the_checkpoint_after_matches() -> None:
    with_heads = {"model": "m", "speculative_config": "auto"}
    found = arguments.parse(with_heads, detect=lambda _model, _revision: Described("mtp", 1)).speculative
    assert found is not None
    assert (found.method, found.num_speculative_tokens) == (("suffix", "mtp"), 5)


def test_auto_takes_no_draft() -> None:
    message = refusal(speculative_config={"method": "auto", "model": "d"})
    assert message == "speculative_config: method 'auto' uses no draft model, got model 'd'"


@pytest.mark.parametrize("given", [None, {}, "null", "None", ""])
def test_nothing_asked_is_no_speculation(given: object) -> None:
    assert parse(speculative_config=given).speculative is None


def test_json_text_hyphens_and_string_booleans_are_read() -> None:
    text = json.dumps({"num-speculative-tokens": "3", "model": "d", "enforce-eager": "False"})
    config = parse(speculative_config=text).speculative
    assert config is not None
    assert (config.num_speculative_tokens, config.enforce_eager) == (3, False)


def test_the_checkpoint_may_tell_the_method() -> None:
    def method(found: Described, **keys: Any) -> Any:
        given = {"model": "m", "speculative_config": {"model": "x", **keys}}
        config = arguments.parse(given, detect=lambda model, revision: found).speculative
        return config and config.method

    assert method(Described("eagle")) == "eagle"
    assert method(Described()) == "draft_model"
    assert method(Described(), method="deepseek_mtp") == "mtp"


SYNTHETIC = {"model": "d", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic"}


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"method": "suffix", "num_speculative_tokens": 15}, "'suffix' is not available; choose one of: auto, draft_"),
        ({"method": ["ngram", "eagle"]}, "'eagle' is not available"),
        ({"num_speculative_tokens": 3}, "needs a method or a draft model"),
        ({"method": "draft_model"}, "needs a model"),
        ({"method": "ngram", "model": "d"}, "uses no draft model"),
        ({"model": "d", "num_speculative_token": 5}, "did you mean 'num_speculative_tokens'"),
        ({"model": "d", "num_speculative_tokens": 0}, "num_speculative_tokens must be greater than 0"),
        ({"model": "d", "num_speculative_tokens": True}, "num_speculative_tokens must be a valid integer, got True"),
        ({"method": "ngram", "prompt_lookup_max": True}, "prompt_lookup_max must be a valid integer, got True"),
        ({"model": "d", "num_speculative_tokens": True, "num_speculative_tokens_per_batch_size": [[1, 4, 3]]}, "True"),
        ({"model": "d", "num_speculative_tokens": 65}, "num_speculative_tokens must be at most 64"),
        ({"model": "d", "draft_tensor_parallel_size": 4}, "draft_tensor_parallel_size must be 1, got 4: the"),
        ({"model": "d", "tensor_parallel_size": 4}, "pass draft_tensor_parallel_size"),
        ({"model": "d", "rejection_sample_method": "strict"}, "'strict' is not available; choose one of: coupled"),
        ({"model": "d", "rejection_sample_method": "block", "acceptance_method": "standard"}, "give one"),
        ({"model": "d", "rejection_sample_method": "synthetic"}, "'synthetic' needs one of synthetic_acceptance_rates"),
        ({"model": "d", "synthetic_acceptance_length": 2.0}, "no other rule takes any; got 1 of them with 'coupled'"),
        ({**SYNTHETIC, "synthetic_acceptance_length": 4.5}, "at most num_speculative_tokens + 1 (4), got 4.5"),
        ({**SYNTHETIC, "synthetic_acceptance_length": 0.5}, "must be at least 1"),
        ({**SYNTHETIC, "synthetic_acceptance_rates": [0.9, 0.5]}, "one rate for each of num_speculative_tokens (3)"),
        ({**SYNTHETIC, "synthetic_acceptance_rates": [0.5, 0.6, 0.1]}, "none above the one before"),
        (
            {"method": "draft_model", "model": "d", "rejection_sample_method": "block", "draft_sample_method": "x"},
            "draft_sample_method",
        ),
        ({"model": "d", "rejection_sample_method": "fly"}, "lossy"),
        ({"model": "d", "acceptance_method": "typical_acceptance_sampler"}, "lossy"),
        ({"model": "d", "quantization": "fp9"}, "quantization must be one of 'int8', 'int4', 'fp8'"),
        ({"method": "ngram", "parallel_drafting": "True"}, "parallel_drafting is not possible with method 'ngram'"),
        ({"method": "ngram", "eagle_topk": 8}, "eagle_topk must be 1 for method 'ngram', got 8: it drafts no tree"),
        ({"method": "ngram", "speculative_token_tree": "[(0,), (1,)]"}, "has branches, but ngram cannot draft them"),
        ({"model": "d", "enforce_eager": "maybe"}, "enforce_eager must be true or false"),
        ({"model": "d", "prompt_lookup_min": 0}, "prompt_lookup_min must be greater than 0"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 2}, "prompt_lookup_min must be at most"),
        ({"model": "d", "num_speculative_tokens_per_batch_size": [[2, 4, 1]]}, "start at batch size 1"),
        ({"model": "d", "num_speculative_tokens_per_batch_size": [[1, 4, 1], [4, 5, 1]]}, "without overlap"),
        ({"model": "d", "num_speculative_tokens_per_batch_size": [[1, 4, -1]]}, "K must be from 0 to"),
        ({"model": "d", "num_speculative_tokens_per_batch_size": [[1, 4]]}, "three integers"),
        ({"model": "d", "num_speculative_tokens": 2, "num_speculative_tokens_per_batch_size": [[1, 4, 3]]}, "0 to 2"),
        ({"model": "d", "disable_by_batch_size": 4, "num_speculative_tokens_per_batch_size": [[1, 4, 3]]}, "give one"),
        ({"model": "d", "disable_by_batch_size": 0}, "disable_by_batch_size must be greater than 0"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_speculative_refusals(keys: dict[str, Any], says: str) -> None:
    assert says in refusal(speculative_config=keys)


@pytest.mark.parametrize("text", ["{", "[1]", "5", "ngram"])
def test_text_that_is_no_json_object(text: str) -> None:
    assert refusal(speculative_config=text).startswith("speculative_config")


@pytest.mark.parametrize("text", ["ngram", '"ngram"', " ngram "])
def test_a_method_alone_is_told_how_it_is_written(text: str) -> None:
    assert refusal(speculative_config=text).endswith('write {"method": "ngram"}')


def test_the_table_gives_k_where_none_is_told() -> None:
    config = speculative(model="d", num_speculative_tokens_per_batch_size=[[1, 2, 7], [3, 9, 0]])
    assert config.num_speculative_tokens == 7
    assert config.num_speculative_tokens_per_batch_size == ((1, 2, 7), (3, 9, 0))


def test_removed_names_are_aliases_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="slipstream"):
        old = parse(
            speculative_model="d",
            num_speculative_tokens=4,
            speculative_draft_tensor_parallel_size=1,
            speculative_disable_by_batch_size=8,
            spec_decoding_acceptance_method="rejection_sampler",
        )
    new = parse(speculative_config={"model": "d", "num_speculative_tokens": 4, "disable_by_batch_size": 8})
    assert old == new
    assert "speculative_model is deprecated" in caplog.text
    ngram = parse(speculative_model="[ngram]", num_speculative_tokens=5, ngram_prompt_lookup_max=4)
    assert ngram.speculative == speculative(method="ngram", num_speculative_tokens=5, prompt_lookup_max=4)


def test_typical_acceptance_is_refused_under_its_old_name_too() -> None:
    assert "lossy" in refusal(speculative_model="d", spec_decoding_acceptance_method="typical_acceptance_sampler")


def test_contradictions_are_named() -> None:
    given = {"speculative_config": {"model": "d", "num_speculative_tokens": 3}, "num_speculative_tokens": 4}
    assert "speculative_config sets num_speculative_tokens to 3" in refusal(**given)


@pytest.mark.parametrize(
    ("given", "method", "k"),
    [
        ({"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "d", "speculative_num_steps": 3,
          "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}, "draft_model", 3),
        ({"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 6}, "ngram", 6),
        ({"assistant_model": "d", "num_assistant_tokens": 20}, "draft_model", 20),
        ({"prompt_lookup_num_tokens": 9}, "ngram", 9),
        ({"speculate": 2}, "ngram", 2),
        ({"model_draft": "d", "draft_max": 3}, "draft_model", 3),
        ({"spec_method": "ngram", "spec_tokens": 3}, "ngram", 3),
    ],
)  # fmt: skip
def test_other_engines_names(given: dict[str, Any], method: str, k: int) -> None:
    config = parse(**given).speculative
    assert config is not None
    assert (config.method, config.num_speculative_tokens) == (method, k)


def test_lossy_thresholds_are_refused() -> None:
    assert "lossy" in refusal(assistant_model="d", speculative_accept_threshold_acc=0.9)


def test_rules_of_acceptance() -> None:
    draft = {"model": "d", "num_speculative_tokens": 3}
    assert not speculative(**draft).samples_drafts
    for rule in ("standard", "block"):
        assert speculative(**draft, rejection_sample_method=rule).samples_drafts
        assert not speculative(**draft, rejection_sample_method=rule, draft_sample_method="greedy").samples_drafts
    both = speculative(**draft, acceptance_method="rejection_sampler", rejection_sample_method="block")
    assert both.rejection_sample_method == "block"
    assert speculative(**SYNTHETIC, synthetic_acceptance_rates=[0.9, 0.5, 0.5]).synthetic_rates == (0.9, 0.5, 0.5)
    assert speculative(**SYNTHETIC, synthetic_acceptance_length=2.25).synthetic_rates == (1.0, 0.25, 0.0)
    with pytest.raises(ConfigError, match="must be its first ones"):
        SpeculativeConfig("medusa", 3, speculative_token_tree=((0,), (2,)), rejection_sample_method="standard")


def test_what_changes_the_answer_or_means_nothing_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    speculative(**SYNTHETIC, synthetic_acceptance_length=2.0)
    speculative(model="d", draft_sample_method="greedy")
    assert "CHANGES THE ANSWER" in caplog.text
    assert "draft_sample_method has no effect with rejection_sample_method 'coupled'" in caplog.text
