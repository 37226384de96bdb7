"""From prompts and parameters to requests: tokenised as transformers does, refused before anything is scheduled."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from protos.config.engine import ModelConfig
from protos.errors import InvalidRequestError, ModelError
from protos.sampling import SamplingParams
from protos.seeds import mix_seed
from runtime.text.preprocessor import Preprocessor, as_prompts, load_tokenizer, render_chat

ROOT = Path(__file__).parents[2]
CORPUS = ["hello world, the future of AI is bright", "def main() -> None: return None"] * 20
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
EOS = 1
VOCAB = 340


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    where = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(where)
    return where


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    loaded = load_tokenizer(ModelConfig(model=str(folder)))
    assert loaded is not None
    return loaded


@pytest.fixture
def preprocessor(tokenizer: PreTrainedTokenizerFast) -> Preprocessor:
    return Preprocessor(tokenizer, vocab_size=VOCAB, max_model_len=64, capacity=1024, eos_ids=(EOS,), seed=3)


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


def test_parameters_are_resolved(preprocessor: Preprocessor, tokenizer: PreTrainedTokenizerFast) -> None:
    params = SamplingParams(
        logprobs=-1,
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
    assert (sampling.logprobs, sampling.prompt_logprobs, sampling.top_k) == (VOCAB, 5, 0)
    assert (sampling.stop_ids, request.eos_ids, sampling.min_tokens) == ((9, EOS), (EOS,), 2)
    assert (sampling.allowed_ids, sampling.logit_bias) == ((4, 5), {3: 1.0})
    assert request.max_tokens == 62
    (blind,) = preprocessor.requests([5, 6], SamplingParams(ignore_eos=True), "r")
    assert (blind.eos_ids, blind.sampling.stop_ids) == ((), ())


def test_bad_words_are_spelt_at_the_start_and_inside_a_text(
    preprocessor: Preprocessor, tokenizer: PreTrainedTokenizerFast
) -> None:
    (request,) = preprocessor.requests([5], SamplingParams(bad_words=["world", "future"]), "r")
    bare = tokenizer.encode("world", add_special_tokens=False)
    spaced = tokenizer.encode(" world", add_special_tokens=False)
    assert tuple(bare) in request.sampling.bad_words
    melts = len(spaced) == len(bare) and spaced[0] != bare[0]
    assert (tuple(spaced) in request.sampling.bad_words) == melts


def test_truncation_keeps_the_end(preprocessor: Preprocessor) -> None:
    ids = list(range(2, 102))
    (request,) = preprocessor.requests(ids, SamplingParams(truncate_prompt_tokens=10), "r")
    assert list(request.prompt_token_ids) == ids[-10:]
    (request,) = preprocessor.requests(ids, SamplingParams(truncate_prompt_tokens=-1, max_tokens=4), "r")
    assert list(request.prompt_token_ids) == ids[-60:]


BAD = [
    ("", {}, "prompt must not be empty", "prompt"),
    ([], {}, "prompt must not be empty", "prompt"),
    ({"prompt_token_ids": []}, {}, "prompt must not be empty", "prompt"),
    ({}, {}, 'prompt must have "prompt"', "prompt"),
    ({"promt": "x"}, {}, "unknown key 'promt', did you mean 'prompt'", "prompt"),
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


# Chat

CHAT = [{"role": "user", "content": "hello"}]


def test_chat_is_rendered_as_transformers_does(preprocessor: Preprocessor, folder: Path) -> None:
    reference = AutoTokenizer.from_pretrained(folder)
    prompt = preprocessor.chat(CHAT)
    expected = reference.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    assert list(prompt.token_ids) == expected
    assert prompt.text == reference.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert preprocessor.chat(parts) == prompt
    assert preprocessor.requests(prompt, SamplingParams(), "r")[0].prompt_token_ids == prompt.token_ids


def test_answers_that_nobody_limits_are_as_long_as_usual(tokenizer: PreTrainedTokenizerFast) -> None:
    sizes = {"vocab_size": VOCAB, "max_model_len": 64, "capacity": 1024}
    for usual, options, wanted in (
        (20, {}, 20),
        (20, {"max_tokens": 30}, 30),
        (20, {"min_tokens": 25}, 25),
        (90, {}, 60),
        (None, {}, 60),
    ):
        made = Preprocessor(tokenizer, usual_tokens=usual, **sizes)
        (request,) = made.requests([5] * 4, SamplingParams(**{"max_tokens": None, **options}), "r")
        assert request.max_tokens == wanted


def test_messages_as_templates_know_them(tokenizer: PreTrainedTokenizerFast) -> None:
    said = [{"role": "developer", "content": "a"}, {"role": "assistant", "content": None, "refusal": None}]
    roles = "{% for m in messages %}{{ m.role }}={{ m.content }}{{ m.keys() | list }};{% endfor %}"
    plain = render_chat(tokenizer, said, chat_template=roles)
    assert plain == "system=a['role', 'content'];assistant=['role', 'content'];"
    assert render_chat(tokenizer, said, chat_template=roles + "{# developer #}").startswith("developer=a")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    calls = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments.x[0] }}{% endfor %}{% endfor %}"
    assert render_chat(tokenizer, [{"role": "assistant", "tool_calls": [call]}], chat_template=calls) == "1"


def test_tools_reach_the_template(tokenizer: PreTrainedTokenizerFast) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    template = "{% if tools %}{{ tools[0].function.name }}{% endif %}."
    assert render_chat(tokenizer, CHAT, chat_template=template, tools=tools) == "f."
    assert render_chat(tokenizer, CHAT, chat_template=template) == "."
    with pytest.raises(InvalidRequestError, match="takes no tools") as refused:
        render_chat(tokenizer, CHAT, tools=tools)
    assert refused.value.param == "tools"


def test_no_template_names_the_way_out(tokenizer: PreTrainedTokenizerFast) -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(InvalidRequestError, match="--chat-template"):
        render_chat(bare, CHAT)
    assert render_chat(bare, CHAT, chat_template="{{ messages[0].content }}") == "hello"


@pytest.mark.parametrize(
    ("messages", "template", "says"),
    [
        ([], None, "messages must be a list with at least one"),
        ("hi", None, "messages must be a list"),
        ([{"content": "x"}], None, "must have a role"),
        ([{"role": "user", "content": 5}], None, "content must be text"),
        ([{"role": "tool", "content": None}], None, "'tool' must have content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "http://x"}]}], None, "got 'image_url'"),
        (CHAT, "{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        (CHAT, "{{ ''.__class__.__mro__ }}", "refuses these messages"),
        (CHAT, "{% for %}", "refuses these messages"),
    ],
)
def test_bad_messages(tokenizer: PreTrainedTokenizerFast, messages: object, template: str | None, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says) as caught:
        render_chat(tokenizer, messages, chat_template=template)
    assert "\n" not in str(caught.value)


# Loading

LOAD = """
import sys
from transformers import PreTrainedTokenizerFast
theirs = "torch" in sys.modules  # transformers 5.17 loads it by itself
from protos.config.engine import ModelConfig
from runtime.text.preprocessor import load_tokenizer
tokenizer = load_tokenizer(ModelConfig(model=sys.argv[1]))
tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
assert tokenizer.encode("hello", add_special_tokens=True)
assert ("torch" in sys.modules) == theirs
"""


def test_loading_a_tokenizer_does_not_load_torch(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


def test_a_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer could be loaded from .*skip_tokenizer_init") as caught:
        load_tokenizer(ModelConfig(model=str(tmp_path)))
    assert "\n" not in str(caught.value)


def test_skip_tokenizer_init_loads_nothing() -> None:
    assert load_tokenizer(ModelConfig(model="nowhere", skip_tokenizer_init=True)) is None


def test_a_tokenizer_in_its_older_files_is_converted(tmp_path: Path) -> None:
    # facebook/opt-* on the Hub have no tokenizer.json.
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.train_from_iterator(
        ["def f(x): return x"] * 9,
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    parts = json.loads(core.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(parts["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(pair) for pair in parts["merges"]))
    (tmp_path / "config.json").write_text('{"model_type": "opt"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    tokenizer = load_tokenizer(ModelConfig(str(tmp_path)))
    assert tokenizer is not None
    text = "def f(x): return x"
    assert tokenizer.backend_tokenizer.encode(text).ids == core.encode(text).ids
