"""From prompts and parameters to requests: tokenized as transformers does, invalid input refused before scheduling."""

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from protos.errors import InvalidRequestError
from protos.sampling import SamplingParams
from protos.seeds import mix_seed
from runtime.text.preprocessor import Preprocessor
from runtime.text.prompts import adds_special_tokens, as_prompts, check_unused

EOS = 1
VOCAB = 340


def test_prompts_tokenise_as_transformers_does(preprocessor: Preprocessor, folder: Path) -> None:
    reference = AutoTokenizer.from_pretrained(folder)
    for text in ["hello", "the future of AI", " spaced", "naïve ☃ 漢字", "a </s> b", "nul\0nul"]:
        (request,) = preprocessor.requests(text, SamplingParams(), "r")
        assert list(request.prompt_token_ids) == reference(text).input_ids


@pytest.mark.parametrize(
    ("prompts", "count"),
    [
        ("x", 1),
        (["x", "y"], 2),
        ([5, 6], 1),
        ([[5, 6], [7]], 2),
        ({"prompt": "x"}, 1),
        (np.array([5, 6]), 1),
        ([{"prompt_token_ids": [5]}, "x"], 2),
        ((5, 6), 1),
    ],
)
def test_every_form_of_prompt(preprocessor: Preprocessor, prompts: object, count: int) -> None:
    single = as_prompts(prompts)
    assert len(single) == count
    for prompt in single:
        assert preprocessor.requests(prompt, SamplingParams(), "r")[0].prompt_token_ids


def test_special_tokens_may_be_left_out_of_text(preprocessor: Preprocessor, folder: Path) -> None:
    plain = AutoTokenizer.from_pretrained(folder)("hello", add_special_tokens=False).input_ids
    for prompt in ("hello", {"prompt": "hello"}):
        assert list(preprocessor.encode(prompt, add_special_tokens=False).token_ids) == plain
        assert list(preprocessor.encode(prompt).token_ids) == [0, *plain]


@pytest.mark.parametrize(
    ("given", "adds"), [(None, True), ({}, True), ({"add_special_tokens": False, "max_length": None}, False)]
)
def test_tokenization_kwargs(given: dict[str, object] | None, adds: bool) -> None:
    assert adds_special_tokens(given, default=True) == adds


def test_what_vllms_llm_takes_and_is_not_done_here_is_refused() -> None:
    for given, says in [({"max_length": 5}, "got 'max_length'"), ({"add_special_tokens": 1}, "true or false, got 1")]:
        with pytest.raises(InvalidRequestError, match=says):
            adds_special_tokens(given, default=True)
    check_unused(None, [0, 0], 2)
    for priority, says in [([0], "must have 2 entries, as prompts, got"), ([0, 3], "must be 0: prompts are served in")]:
        with pytest.raises(InvalidRequestError, match=f"priority {says}"):
            check_unused(None, priority, 2)
    with pytest.raises(InvalidRequestError, match="lora_request is not supported"):
        check_unused(object())


def test_samples_have_their_own_seeds_and_names(preprocessor: Preprocessor) -> None:
    requests = preprocessor.requests([5, 6], SamplingParams(n=3, seed=7, prompt_logprobs=2), "r")
    assert [request.request_id for request in requests] == ["r-0", "r-1", "r-2"]
    assert [request.sampling.seed for request in requests] == [7, mix_seed(7, 1), mix_seed(7, 2)]
    assert [request.sampling.prompt_logprobs for request in requests] == [2, None, None]


def test_the_engine_seed_repeats_the_drawn_seeds(tokenizer: PreTrainedTokenizerFast) -> None:
    def seeds(seed: int | None) -> list[int]:
        made = Preprocessor(tokenizer, vocab_size=VOCAB, max_model_len=64, capacity=64, seed=seed)
        return [made.requests([5], SamplingParams(), str(i))[0].sampling.seed for i in range(4)]

    assert seeds(1) == seeds(1) != seeds(2)
    assert seeds(None) != seeds(None)
    assert len(set(seeds(1))) == 4


def test_no_two_requests_share_a_seed_where_seeds_are_mixed(tokenizer: PreTrainedTokenizerFast) -> None:
    def seeds(seed: int | None) -> list[int]:
        sizes = {"vocab_size": VOCAB, "max_model_len": 64, "capacity": 64}
        made = Preprocessor(tokenizer, **sizes, seed=seed, mixes_seeds=True)
        given = [SamplingParams(seed=wanted) for wanted in (7, 7, 8, -1, None, None)]
        return [made.requests([5], params, "r")[0].sampling.seed for params in given]

    assert seeds(1) == seeds(1) != seeds(2)
    assert seeds(None) != seeds(None)
    assert len(set(seeds(1))) == 6


def test_parameters_are_resolved(preprocessor: Preprocessor, tokenizer: PreTrainedTokenizerFast) -> None:
    params = SamplingParams(
        logprobs=20,
        prompt_logprobs=5,
        top_k=10**6,
        min_tokens=2,
        stop_token_ids=[9],
        logit_bias={3: 1.0},
        allowed_token_ids=[4, 5],
        max_tokens=None,
    )
    (request,) = preprocessor.requests([5, 6], params, "r")
    sampling = request.sampling
    assert (sampling.logprobs, sampling.prompt_logprobs, sampling.top_k) == (20, 5, 0)
    assert (sampling.stop_ids, request.eos_ids, sampling.min_tokens) == ((9, EOS), (EOS,), 2)
    assert (sampling.allowed_ids, sampling.logit_bias) == (bytes([1 << 4 | 1 << 5]), {3: 1.0})
    assert request.max_tokens == 62
    (blind,) = preprocessor.requests([5, 6], SamplingParams(ignore_eos=True), "r")
    assert (blind.eos_ids, blind.sampling.stop_ids) == ((), ())


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize(
    ("limit", "requested", "found"),
    [(20, 20, 20), (20, 21, "20, got 21$"), (20, -1, f"20, got -1, all {VOCAB}$"), (0, 0, 0), (0, 1, "0, got 1$"),
     (-1, 10**6, VOCAB), (-1, -1, VOCAB), (VOCAB, -1, VOCAB)],
)  # fmt: skip
def test_the_number_of_logprobs_is_limited(
    tokenizer: PreTrainedTokenizerFast, name: str, limit: int, requested: int, found: int | str
) -> None:
    made = Preprocessor(tokenizer, vocab_size=VOCAB, max_model_len=64, capacity=64, max_logprobs=limit)
    params = SamplingParams(**{name: requested})
    if isinstance(found, int):
        assert getattr(made.requests([5], params, "r")[0].sampling, name) == found
        return
    with pytest.raises(InvalidRequestError, match=f"^{name} must be at most {found}") as caught:
        made.requests([5], params, "r")
    assert caught.value.param == name


def test_bad_words_are_spelt_at_the_start_and_inside_a_text(
    preprocessor: Preprocessor, tokenizer: PreTrainedTokenizerFast
) -> None:
    (request,) = preprocessor.requests([5], SamplingParams(bad_words=["world", "future"]), "r")
    bare = tokenizer.encode("world", add_special_tokens=False)
    spaced = tokenizer.encode(" world", add_special_tokens=False)
    assert tuple(bare) in request.sampling.bad_words
    melts = len(spaced) == len(bare) and spaced[0] != bare[0]
    assert (tuple(spaced) in request.sampling.bad_words) == melts


@pytest.mark.parametrize("word", [" ", "\n", "\n\n"])
def test_white_space_is_a_bad_word(word: str, preprocessor: Preprocessor, tokenizer: PreTrainedTokenizerFast) -> None:
    (request,) = preprocessor.requests([5], SamplingParams(bad_words=[word]), "r")
    assert tuple(tokenizer.encode(word, add_special_tokens=False)) in request.sampling.bad_words


def test_truncation_keeps_the_end(preprocessor: Preprocessor) -> None:
    ids = list(range(2, 102))
    (request,) = preprocessor.requests(ids, SamplingParams(truncate_prompt_tokens=10), "r")
    assert list(request.prompt_token_ids) == ids[-10:]
    (request,) = preprocessor.requests(ids, SamplingParams(truncate_prompt_tokens=-1, max_tokens=4), "r")
    assert list(request.prompt_token_ids) == ids[-60:]
    params = SamplingParams(truncate_prompt_tokens=-1, max_tokens=None, min_tokens=8)
    (request,) = preprocessor.requests(ids, params, "r")
    assert list(request.prompt_token_ids) == ids[-56:]


BAD = [
    ("", {}, "prompt must not be empty", "prompt"),
    ([], {}, "prompt must not be empty", "prompt"),
    ({"prompt_token_ids": []}, {}, "prompt must not be empty", "prompt"),
    ({}, {}, 'prompt must have "prompt"', "prompt"),
    ({"promt": "x"}, {}, "unknown key 'promt'; it may have cache_salt, prompt, prompt_token_ids", "prompt"),
    ({"prompt": "x", "multi_modal_data": {"image": 1}}, {}, "unknown key 'multi_modal_data'; it may have", "prompt"),
    ({"prompt": 5}, {}, "prompt must have", "prompt"),
    (5, {}, "prompt must be", "prompt"),
    (None, {}, "prompt must be", "prompt"),
    ([1, "x"], {}, "flat list of token ids", "prompt"),
    ([1, 2.5], {}, "flat list of token ids", "prompt"),
    ([1, True], {}, "flat list of token ids", "prompt"),
    ([-1], {}, "token id -1; ids are from 0 to 339", "prompt"),
    ([5, VOCAB], {}, "token id 340; ids are from 0 to 339", "prompt"),
    ([2**70], {}, f"token id {2**70}; ids are from 0 to 339", "prompt"),
    ("a\ud800b", {}, "lone surrogate (U+D800) at character 1", "prompt"),
    ({"prompt": "x", "cache_salt": "\ud800"}, {}, "cache_salt has a lone surrogate", "cache_salt"),
    ([5] * 64, {}, "prompt has 64 tokens, but the context of 64", "prompt"),
    ([5] * 60, {"max_tokens": 5}, "max_tokens must be at most 4 with this prompt, got 5", "max_tokens"),
    ([5], {"max_tokens": 10**9}, "max_tokens must be at most 63", "max_tokens"),
    ([5], {"max_tokens": None, "min_tokens": 64}, "min_tokens must be at most 63", "min_tokens"),
    ("word " * 10**6, {}, "characters", "prompt"),
    ([5], {"stop_token_ids": [VOCAB]}, "stop_token_ids has token id 340", "stop_token_ids"),
    ([5], {"logit_bias": {VOCAB: 1.0}}, "logit_bias has token id 340", "logit_bias"),
    ([5], {"allowed_token_ids": [VOCAB]}, "allowed_token_ids has token id 340", "allowed_token_ids"),
    ([5], {"allowed_token_ids": [EOS], "min_tokens": 1}, "leaves no token to choose", "allowed_token_ids"),
    ([5], {"bad_words": ["\ud800"]}, "bad_words[0] must be text without lone surrogates", "bad_words"),
]


@pytest.mark.parametrize(("prompt", "options", "says", "param"), BAD, ids=lambda x: str(x)[:24])
def test_bad_input_is_refused_with_value_and_limit(
    preprocessor: Preprocessor, prompt: object, options: dict[str, object], says: str, param: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        [preprocessor.requests(one, SamplingParams(**options), "r") for one in as_prompts(prompt)]
    message = str(caught.value)
    assert says in message
    assert caught.value.param == param
    assert "\n" not in message
    assert len(message) < 300


def test_what_the_cache_can_never_hold_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    small = Preprocessor(tokenizer, vocab_size=VOCAB, max_model_len=64, capacity=32, eos_ids=(EOS,))
    assert small.requests([5] * 10, SamplingParams(max_tokens=23), "r")[0].max_tokens == 23
    assert small.requests([5] * 10, SamplingParams(max_tokens=None), "r")[0].max_tokens == 23
    with pytest.raises(InvalidRequestError, match="KV cache of 32 tokens"):
        small.requests([5] * 10, SamplingParams(max_tokens=24), "r")


def test_huge_text_is_refused_without_being_tokenised(
    preprocessor: Preprocessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PreTrainedTokenizerFast, "encode", lambda *_, **__: pytest.fail("it was tokenised"))
    for params in (SamplingParams(), SamplingParams(truncate_prompt_tokens=5)):
        with pytest.raises(InvalidRequestError, match="10000000 characters"):
            preprocessor.requests("a" * 10**7, params, "r")


def test_without_a_tokenizer_only_ids_are_taken() -> None:
    plain = Preprocessor(None, vocab_size=VOCAB, max_model_len=64, capacity=64)
    assert plain.requests([5], SamplingParams(), "r")[0].prompt_token_ids == (5,)
    for prompt, options in [("text", {}), ([5], {"bad_words": ["x"]})]:
        with pytest.raises(InvalidRequestError, match="skip_tokenizer_init"):
            plain.requests(prompt, SamplingParams(**options), "r")
