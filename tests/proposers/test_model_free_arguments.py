"""What users write about model-free proposers, and the prediction that a request may bring."""

from typing import Any

import pytest

from proposers import registry
from protos.config import arguments
from protos.config.engine import SpeculativeConfig
from protos.errors import ConfigError, InvalidRequestError
from protos.sampling import SamplingParams
from runtime.text.preprocessor import Preprocessor
from tests.support.models import tiny_pairs


def parse(**keys: Any) -> SpeculativeConfig:
    config = arguments.parse({"model": "m", "speculative_config": keys}, methods=registry.names()).speculative
    assert config is not None
    return config


def test_suffix_decoding_takes_the_four_keys_and_their_defaults() -> None:
    config = parse(method="suffix")
    assert (config.num_speculative_tokens, config.suffix_decoding_max_tree_depth) == (24, 24)
    assert (config.suffix_decoding_max_cached_requests, config.suffix_decoding_max_spec_factor) == (10_000, 1.0)
    assert config.suffix_decoding_min_token_prob == 0.1
    config = parse(
        method="suffix",
        suffix_decoding_max_tree_depth=64,
        suffix_decoding_max_cached_requests=0,
        suffix_decoding_max_spec_factor=2,
        suffix_decoding_min_token_prob=0,
    )
    assert (config.num_speculative_tokens, config.suffix_decoding_max_spec_factor) == (64, 2.0)
    assert parse(method="suffix", num_speculative_tokens=7).num_speculative_tokens == 7


def test_lookahead_takes_its_window_by_other_engines_names_too() -> None:
    assert parse(method="lookahead").num_speculative_tokens == 56
    config = parse(method="lookahead", max_window_size=4, max_ngram_size=3, max_verification_set_size=5)
    assert (config.lookahead_window, config.lookahead_ngram, config.lookahead_guesses) == (4, 3, 5)
    assert config.num_speculative_tokens == (4 + 5) * 2
    assert parse(method="lookahead", lookahead_window=30).num_speculative_tokens == 64


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, "min_token_prob must be at most 1"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 1}, "max_tree_depth must be at least 2"),
        ({"method": "suffix", "model": "d"}, "method 'suffix' uses no draft model, got model 'd'"),
        ({"method": "rest"}, "method 'rest' needs a datastore"),
        ({"method": "ngram", "draft_shape": "bush"}, "draft_shape must be one of"),
        ({"method": ["suffix", "ngrm"]}, "'ngrm' is not available"),
        ({"method": "lookahead", "lookahead_ngram": 1}, "lookahead_ngram must be at least 2"),
    ],
)
def test_what_makes_no_sense_is_refused(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(**keys)


def test_a_cascade_is_a_list_of_methods() -> None:
    assert parse(method=["suffix", "ngram"], num_speculative_tokens=3).method == ("suffix", "ngram")


@pytest.fixture(scope="module")
def preprocessor(tmp_path_factory: pytest.TempPathFactory) -> Preprocessor:
    from transformers import PreTrainedTokenizerFast

    target, _ = tiny_pairs.build(tmp_path_factory.mktemp("pair"))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    size = len(tokenizer.get_vocab())
    return Preprocessor(tokenizer, vocab_size=size, max_model_len=32, capacity=64)


def test_a_prediction_is_text_or_ids_and_is_cut_to_the_context(preprocessor: Preprocessor) -> None:
    def ids(prediction: object) -> tuple[int, ...]:
        [request] = preprocessor.requests("x", SamplingParams(prediction=prediction), "r")
        return request.prediction_token_ids

    assert ids(None) == ids("") == ()
    assert ids("def f") == preprocessor.tokenize("def f", add_special_tokens=False)
    assert ids([5, 6]) == (5, 6)
    assert len(ids("a" * 100)) == 32
    with pytest.raises(InvalidRequestError, match="prediction has token id 100000"):
        ids([100_000])


def test_text_needs_a_tokenizer() -> None:
    bare = Preprocessor(None, vocab_size=10, max_model_len=32, capacity=64)
    [request] = bare.requests([1, 2], SamplingParams(prediction=[3]), "r")
    assert request.prediction_token_ids == (3,)
    with pytest.raises(InvalidRequestError, match="prediction is text"):
        bare.requests([1, 2], SamplingParams(prediction="x"), "r")
