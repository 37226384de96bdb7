"""SamplingParams: what is taken, what is refused, and how the refusal reads."""

import dataclasses
import math
import re

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.errors import InvalidRequestError
from protos.messages import Request, Sampling
from protos.sampling import SamplingParams

BAD = [
    ("n", 0, "at least 1"),
    ("n", 129, "at most 128"),
    ("n", 10**400, "at most 128"),
    ("n", 1.5, "integer"),
    ("n", True, "integer, got True"),
    ("max_tokens", True, "integer, got True"),
    ("temperature", False, "number, got False"),
    ("temperature", -0.1, "at least 0"),
    ("temperature", 1e9, "at most 100"),
    ("top_p", 0.0, "greater than 0"),
    ("top_p", 1.01, "at most 1"),
    ("top_k", -2, "at least 0"),
    ("min_p", 1.5, "at most 1"),
    ("presence_penalty", 2.5, "at most 2"),
    ("frequency_penalty", -2.5, "at least -2"),
    ("repetition_penalty", 0.0, "at least 0.001"),
    ("seed", -2, "at least 0"),
    ("seed", 2**64, "at most 18446744073709551615"),
    ("stop", [""], "at least 1 character"),
    ("stop", ["x"] * 65, "at most 64"),
    ("stop", ["x" * 1025], "at most 1024"),
    ("stop", 5, "a valid list"),
    ("stop_token_ids", [-1], "at least 0"),
    ("stop_token_ids", [7, True], "stop_token_ids[1] must be a valid integer, got True"),
    ("stop_token_ids", {True}, "stop_token_ids[0] must be a valid integer, got True"),
    ("allowed_token_ids", (False,), "allowed_token_ids[0] must be a valid integer, got False"),
    ("prediction", [True], "prediction[0] must be a valid integer, got True"),
    ("stop_token_ids", [2**40], "at most"),
    ("bad_words", ["x"] * 257, "at most 256"),
    ("bad_words", [""], "at least 1 character"),
    ("max_tokens", 0, "at least 1"),
    ("max_tokens", -5, "at least 1"),
    ("max_tokens", 10**30, "at most"),
    ("min_tokens", -1, "at least 0"),
    ("min_tokens", 17, "at most max_tokens (16)"),
    ("logprobs", 2**31, "at most 2147483647"),
    ("logprobs", -2, "at least -1"),
    ("truncate_prompt_tokens", 0, "at least 1"),
    ("logit_bias", {1: 101.0}, "at most 100"),
    ("logit_bias", {-1: 1.0}, "at least 0"),
    ("logit_bias", {1: True}, "logit_bias[1] must be a valid number, got True"),
    ("logit_bias", {True: 1.0}, "logit_bias[True] must be a valid number, got True"),
    ("logits_processors", [print], "got 1 item(s): use logit_bias"),
    ("logit_bias", dict.fromkeys(range(1025), 0.0), "at most 1024"),
    ("allowed_token_ids", [], "at least 1 item"),
]
FLOATS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]


@pytest.mark.parametrize(("name", "value", "limit"), BAD, ids=lambda x: str(x)[:24])
def test_refusals_name_the_argument_and_the_limit_on_one_line(name: str, value: object, limit: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert name in message
    assert limit in message
    assert "\n" not in message
    assert len(message) < 250
    assert caught.value.param == name


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_refused_everywhere(name: str, value: float) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} must be"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_is_refused_inside_logit_bias(value: float) -> None:
    with pytest.raises(InvalidRequestError, match=r"logit_bias\['?7'?\] must be finite"):
        SamplingParams(logit_bias={7: value})


def test_booleans_are_no_numbers_by_position_either() -> None:
    with pytest.raises(InvalidRequestError, match="n must be a valid integer, got True"):
        SamplingParams(True)
    with pytest.raises(InvalidRequestError, match="presence_penalty must be a valid number, got False"):
        SamplingParams(1, False)
    assert SamplingParams(2, 0.5) == SamplingParams(n=2, presence_penalty=0.5)


@pytest.mark.parametrize(
    ("name", "value", "got"),
    [
        ("temperature", "1.0", "temperature must be a valid number, got '1.0'"),
        ("max_tokens", "2", "max_tokens must be a valid integer, got '2'"),
        ("stop_token_ids", "12", "stop_token_ids must be a valid integer, got '12'"),
        ("stop_token_ids", ["1"], "stop_token_ids[0] must be a valid integer, got '1'"),
        ("logit_bias", {"5": "1"}, "logit_bias['5'] must be a valid number, got '1'"),
        ("prediction", [3, "4"], "prediction[1] must be a valid integer, got '4'"),
        ("allowed_token_ids", np.array([False, True]), "allowed_token_ids[0] must be a valid integer, got False"),
        ("stop_token_ids", [np.True_], "stop_token_ids[0] must be a valid integer, got True"),
        ("temperature", np.array(True), "temperature must be a valid number, got True"),
        ("ignore_eos", 1, "ignore_eos must be a valid boolean, got 1"),
        ("detokenize", "false", "detokenize must be a valid boolean, got 'false'"),
        ("structured_outputs", {"json_object": 1}, "json_object must be a valid boolean, got 1"),
    ],
)
def test_text_and_booleans_are_no_numbers_and_numbers_no_booleans(name: str, value: object, got: str) -> None:
    """As in the bodies of HTTP requests."""
    with pytest.raises(InvalidRequestError, match=re.escape(got)):
        SamplingParams(**{name: value})


def test_numbers_of_numpy_are_numbers() -> None:
    params = SamplingParams(temperature=np.float32(0.5), seed=np.int64(3), allowed_token_ids=np.array([1, 2]))  # type: ignore[arg-type]
    assert (params.temperature, params.seed, params.allowed_token_ids) == (0.5, 3, (1, 2))
    assert SamplingParams(prediction="12").prediction == "12"


def test_a_wrong_keyword_gets_a_hint() -> None:
    with pytest.raises(InvalidRequestError, match="unknown argument 'temprature', did you mean 'temperature'"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


def test_what_vllm_users_write_is_taken() -> None:
    params = SamplingParams(stop="\n", stop_token_ids=[7], bad_words=["x"], logit_bias={"5": 1}, top_k=-1)
    assert (params.stop, params.stop_token_ids, params.bad_words) == (("\n",), (7,), ("x",))
    assert (params.logit_bias, params.top_k) == ({5: 1.0}, 0)
    assert SamplingParams(stop=None, stop_token_ids=None, bad_words=None) == SamplingParams()


def test_tiny_temperatures_are_greedy_and_small_ones_are_kept() -> None:
    assert SamplingParams(temperature=9e-6).temperature == 0.0
    assert SamplingParams(temperature=0.005).temperature == 0.005


def test_vllm_fields_without_meaning_pass_and_those_with_meaning_are_refused() -> None:
    assert SamplingParams(output_kind=2, extra_args=None, best_of=None) == SamplingParams()  # type: ignore[call-arg]
    assert SamplingParams(n=2, best_of=2) == SamplingParams(n=2)  # type: ignore[call-arg]
    with pytest.raises(InvalidRequestError, match="best_of is not supported, got 3: use n"):
        SamplingParams(best_of=3)  # type: ignore[call-arg]
    with pytest.raises(InvalidRequestError, match="use_beam_search is not supported"):
        SamplingParams(use_beam_search=True)  # type: ignore[call-arg]


def test_seed_minus_one_is_no_seed() -> None:
    assert SamplingParams(seed=-1).seed is None
    with pytest.raises(InvalidRequestError, match="seed must be at least 0, got -2"):
        SamplingParams(seed=-2)


def test_stop_strings_need_text() -> None:
    with pytest.raises(InvalidRequestError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_replace_validates_again() -> None:
    assert dataclasses.replace(SamplingParams(), n=3).n == 3
    with pytest.raises(InvalidRequestError):
        dataclasses.replace(SamplingParams(), n=0)


@given(
    st.builds(
        SamplingParams,
        n=st.integers(1, 128),
        seed=st.none() | st.integers(0, 2**64 - 1),
        temperature=st.floats(0, 100),
        stop=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=9), max_size=4),
        stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=4),
        logit_bias=st.none() | st.dictionaries(st.integers(0, 10**6), st.floats(-100, 100), max_size=3),
        allowed_token_ids=st.none() | st.lists(st.integers(0, 9), min_size=1, max_size=3),
        max_tokens=st.none() | st.integers(1, 2**31 - 1),
    )
)
def test_it_crosses_processes_as_msgpack(params: SamplingParams) -> None:
    request = Request("r", (1, 2), params, Sampling(seed=2**64 - 1), max_tokens=3)
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Request)
    assert copy == request
    assert type(copy.params) is SamplingParams
    assert type(copy.params.stop) is tuple


def test_log_probabilities_alone_may_be_switched_on_as_in_vllm() -> None:
    params = SamplingParams(logprobs=True, prompt_logprobs=True)
    assert (params.logprobs, params.prompt_logprobs) == (1, 1)
    assert type(params.logprobs) is int


def test_a_clone_is_equal() -> None:
    params = SamplingParams(n=2, stop="x", logit_bias={3: 1.0})
    copied = params.clone()
    assert copied == params
    assert copied is not params


def test_a_list_that_contains_itself_is_refused_as_any_other() -> None:
    ids: list[object] = [1]
    ids.append(ids)
    with pytest.raises(InvalidRequestError, match="stop_token_ids"):
        SamplingParams(stop_token_ids=ids)  # type: ignore[arg-type]
