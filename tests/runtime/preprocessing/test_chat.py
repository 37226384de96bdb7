"""Chat messages and tools rendered by templates."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from protos.errors import InvalidRequestError
from protos.sampling import SamplingParams
from runtime.text.chat import render_chat
from runtime.text.preprocessor import Preprocessor

VOCAB = 340
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


def test_answers_without_a_limit_are_as_long_as_usual(tokenizer: PreTrainedTokenizerFast) -> None:
    sizes = {"vocab_size": VOCAB, "max_model_len": 64, "capacity": 1024}
    for usual, options, wanted in (
        (20, {}, 20),
        (20, {"max_tokens": 30}, 30),
        (20, {"min_tokens": 25}, 25),
        (90, {}, 60),
        (None, {}, 60),
    ):
        made = Preprocessor(tokenizer, default_max_tokens=usual, **sizes)
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


def test_what_ends_before_its_end_or_has_no_text_is_rendered(tokenizer: PreTrainedTokenizerFast) -> None:
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}"
    template = "{% for m in messages %}{{ m.content }}" + calls + ";{% endfor %}"
    call = {"function": {"name": "f", "arguments": '{"a": [1, 2, "b'}}
    said = [
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "tool_calls": [call]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
        {"role": "tool", "tool_call_id": "1", "content": []},
    ]
    assert render_chat(tokenizer, said, chat_template=template) == "No.{'a': [1, 2, 'b']};{};;"


@pytest.mark.parametrize("arguments", ['{"a":1 "b":2}', '{"a": [1 2]}', '{"a": 1} x', "[1"])
def test_arguments_that_are_wrong_before_their_end_are_refused(
    tokenizer: PreTrainedTokenizerFast, arguments: str
) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    with pytest.raises(InvalidRequestError, match="JSON object"):
        render_chat(tokenizer, [{"role": "assistant", "tool_calls": [call]}], chat_template="x")


@pytest.mark.parametrize("content", [None, "", [], "  \n", [{"type": "text", "text": ""}]])
def test_an_answer_that_begins_with_nothing_is_a_new_one(tokenizer: PreTrainedTokenizerFast, content: object) -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>\n\n{{ m.content | trim }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>\n\n{% endif %}"
    )
    begun = [*CHAT, {"role": "assistant", "content": content}]
    options = {"chat_template": template, "continue_final_message": True, "add_generation_prompt": False}
    assert render_chat(tokenizer, begun, **options) == render_chat(tokenizer, CHAT, chat_template=template)
    some = [*CHAT, {"role": "assistant", "content": "a"}]
    assert render_chat(tokenizer, some, **options).endswith("<assistant>\n\na")


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
        ([{"role": "assistant", "content": [{"type": "refusal", "text": "No."}]}], None, "got 'refusal'"),
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
