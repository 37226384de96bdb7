"""Tool calls chosen by the model, through the OpenAI client; the fake model generates the text given in the prompt."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from protos.config.engine import SpeculativeConfig
from protos.errors import ConfigError
from runtime.http.tools.choice import ToolOptions
from tests.support.serving.fake_engine import Scripted, local_engine, tokenizer
from tests.support.serving.http_server import Served, serving
from tests.support.serving.openai_answers import strict
from tests.support.serving.openai_responses import PAINT_TOOL, WAIT_TOOL
from tests.support.serving.openai_structured_checks import OTHER, WIDE

TOOLS: Any = [WIDE, OTHER]
PAINT = '{"color": "red", "is_sure": true}'
HERMES = f'<tool_call>\n{{"name": "paint", "arguments": {PAINT}}}\n</tool_call>'
WAIT = '<tool_call>{"name": "wait", "arguments": {"long": "1"}}</tool_call>'
LLAMA = f'{{"name": "paint", "parameters": {PAINT}}}'


def scripted(parser: str) -> Iterator[Served]:
    drafts = SpeculativeConfig(method="draft_model", num_speculative_tokens=3, model="none", policy="fixed")
    engine = local_engine(max_model_len=4096, speculative=drafts, kind=Scripted)
    with serving(engine, tools=ToolOptions(parser, auto=True)) as running:
        yield running


@pytest.fixture(scope="module")
def hermes() -> Iterator[Served]:
    yield from scripted("hermes")


@pytest.fixture(scope="module")
def llama() -> Iterator[Served]:
    yield from scripted("llama3_json")


def asked(text: str, **options: Any) -> dict[str, Any]:
    message = {"role": "user", "content": f"say: {text}<end>"}
    return {"model": "fake", "messages": [message], "tools": TOOLS, "max_tokens": 400, **options}


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


def test_a_call_in_the_words_of_hermes(hermes: Served) -> None:
    answer = strict(hermes.client.chat.completions.create(**asked("Let me see.\n" + HERMES)))
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    assert calls_of(choice.message) == [("paint", PAINT)]
    assert choice.message.tool_calls
    assert choice.message.tool_calls[0].id.startswith("call_")


def test_a_call_in_the_words_of_llama(llama: Served) -> None:
    (choice,) = strict(llama.client.chat.completions.create(**asked(f"{LLAMA}; {LLAMA}"))).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert calls_of(choice.message) == [("paint", PAINT)] * 2


@pytest.mark.parametrize("text", ['{"name": "Alice", "age": 30}', '{"name": "fly", "parameters": {"to": "Rome"}}'])
def test_an_answer_in_json_is_no_call_of_llama(llama: Served, text: str) -> None:
    (choice,) = strict(llama.client.chat.completions.create(**asked(text))).choices
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", text, None)
    stream = llama.client.chat.completions.create(**asked(text), stream=True)
    assert "".join(strict(chunk).choices[0].delta.content or "" for chunk in stream) == text
    response = llama.post("/v1/responses", input=asked(text)["messages"], tools=[PAINT_TOOL, WAIT_TOOL]).json()
    assert response["output"][0]["content"][0]["text"] == text


def test_streamed_calls_have_dense_indices(hermes: Served) -> None:
    options = asked("Hm. " + HERMES + "\n" + WAIT + "\n", stream=True)
    deltas, reasons = [], []
    for chunk in hermes.client.chat.completions.create(**options):
        deltas.append(strict(chunk).choices[0].delta)
        reasons.append(chunk.choices[0].finish_reason)
    parts = [part for delta in deltas for part in delta.tool_calls or ()]
    assert [part.index for part in parts] == [0, 1]
    assert len({part.id for part in parts}) == 2
    assert [(part.function.name, part.function.arguments) for part in parts if part.function] == [
        ("paint", PAINT),
        ("wait", '{"long": "1"}'),
    ]
    assert "".join(delta.content or "" for delta in deltas) == "Hm."
    assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]


def test_the_helper_gathers_streamed_calls(hermes: Served) -> None:
    with hermes.client.chat.completions.stream(**asked(HERMES + WAIT)) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = strict(stream.get_final_completion())
    assert [(event.index, event.name) for event in done] == [(0, "paint"), (1, "wait")]
    assert calls_of(final.choices[0].message) == [("paint", PAINT), ("wait", '{"long": "1"}')]


@pytest.mark.parametrize("stream", [False, True])
def test_at_most_one_call_where_several_are_not_wanted(hermes: Served, stream: bool) -> None:
    options = asked(HERMES + WAIT, parallel_tool_calls=False)
    if not stream:
        (choice,) = strict(hermes.client.chat.completions.create(**options)).choices
        assert calls_of(choice.message) == [("paint", PAINT)]
        return
    with hermes.client.chat.completions.stream(**options) as helper:
        assert calls_of(helper.get_final_completion().choices[0].message) == [("paint", PAINT)]


@pytest.mark.parametrize("text", ["No call at all. ", "<tool_call>\nf(x=1)\n</tool_call>", '<tool_call>{"name": 1}'])
def test_what_is_no_call_is_text(hermes: Served, text: str) -> None:
    (choice,) = strict(hermes.client.chat.completions.create(**asked(text))).choices
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", text, None)
    stream = hermes.client.chat.completions.create(**asked(text), stream=True)
    assert "".join(strict(chunk).choices[0].delta.content or "" for chunk in stream) == text


def test_a_call_that_was_cut_off_is_text(hermes: Served) -> None:
    (choice,) = strict(hermes.client.chat.completions.create(**asked(HERMES, max_tokens=30))).choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
    assert HERMES.startswith(choice.message.content or "?")


def test_logprobs_are_of_all_tokens_whatever_they_became(hermes: Served) -> None:
    options = asked(HERMES, logprobs=True, top_logprobs=1)
    (choice,) = strict(hermes.client.chat.completions.create(**options)).choices
    assert choice.logprobs is not None
    whole = "".join(entry.token for entry in choice.logprobs.content or ())
    assert whole.removesuffix("<eos>") == HERMES
    chunks = [strict(chunk).choices[0] for chunk in hermes.client.chat.completions.create(**options, stream=True)]
    entries = [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content or ()]
    assert "".join(entry.token for entry in entries) == whole


def test_none_means_that_the_model_is_not_told(hermes: Served) -> None:
    options = asked(HERMES, tool_choice="none")
    (choice,) = strict(hermes.client.chat.completions.create(**options)).choices
    assert (choice.message.content, choice.finish_reason) == (HERMES, "stop")
    with_tools = hermes.client.chat.completions.create(**asked("x", max_tokens=1)).usage
    without = hermes.client.chat.completions.create(**asked("x", max_tokens=1, tool_choice="none")).usage
    assert with_tools is not None
    assert without is not None
    assert with_tools.prompt_tokens > without.prompt_tokens + 100


def test_the_next_turn_holds_calls_and_their_results(hermes: Served) -> None:
    first = hermes.client.chat.completions.create(**asked(HERMES)).choices[0].message
    assert first.tool_calls
    messages = [
        *asked(HERMES)["messages"],
        first,
        {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "say: It is red.<end>"},
    ]
    answer = hermes.client.chat.completions.create(model="fake", messages=messages, tools=TOOLS, max_tokens=50)
    assert strict(answer).choices[0].message.content == "It is red."
    sent = [message if isinstance(message, dict) else message.model_dump(exclude_none=True) for message in messages]
    told = hermes.post("/tokenize", messages=sent, tools=TOOLS).json()["tokens"]
    text = tokenizer().decode(told)
    assert f"[call] {PAINT}" in text
    assert '[tools] [{"type": "function", "function": {"name": "paint"' in text
    assert '"strict"' not in text


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice", "'fly'"),
    ({"tool_choice": "must"}, "tool_choice", "tool_choice must be none, auto, required or"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "tool_choice must be none, auto, required or"),
    ({"tool_choice": {"type": "function", "function": {"name": "wait", "x": 1}}}, "tool_choice", "must be none, auto"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"tools": [WIDE, WIDE]}, "tools", "'paint' twice"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools", "function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "must match"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools", "dictionary"),
    ({"tools": [OTHER] * 129}, "tools", "at most 128"),
    ({"functions": [{"name": "f"}]}, "functions", "use tools"),
    ({"function_call": {"name": "f"}}, "function_call", "use tool_choice"),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "--chat-template"),
    ({"chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs", "got [1] for a"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]},
        "messages",
        "JSON object",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "x("}}]}]},
        "messages",
        "JSON object",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "messages", "function with a name"),
    ({"messages": [{"role": "user"}]}, "messages", "'user' must have content"),
]


@pytest.mark.parametrize(("body", "param", "words"), BAD, ids=[f"{p}-{w[:12]}" for _, p, w in BAD])
def test_bad_tools(hermes: Served, body: dict[str, Any], param: str, words: str) -> None:
    answer = hermes.post("/v1/chat/completions", **(asked("x") | body))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert len(error["message"]) < 400


def test_a_server_that_was_not_told_to_let_the_model_choose() -> None:
    with serving(local_engine(kind=Scripted)) as plain:
        with pytest.raises(openai.BadRequestError, match="--enable-auto-tool-choice and --tool-call-parser"):
            plain.client.chat.completions.create(**asked(HERMES))
        without: dict[str, Any] = asked("Hi.", tool_choice="none")
        assert plain.client.chat.completions.create(**without).choices[0].message.content == "Hi."


def test_calls_that_are_only_thought_of_where_the_prompt_opens_the_thoughts(hermes: Served) -> None:
    """As templates of reasoning models do."""
    text = f"Or {WAIT}? No.</think>\n{HERMES}"
    sent = asked(text, extra_body={"add_generation_prompt": False})
    sent["messages"][0]["content"] += " <think>"
    (choice,) = strict(hermes.client.chat.completions.create(**sent)).choices
    assert calls_of(choice.message) == [("paint", PAINT)]
    assert choice.message.content == f"Or {WAIT}? No.</think>"


def test_a_template_that_takes_no_tools() -> None:
    bare = tokenizer()
    template, bare.chat_template = bare.chat_template, "{% for m in messages %}{{ m.content }}{% endfor %}"
    try:
        with serving(local_engine(), tools=ToolOptions("hermes", auto=True)) as served:
            answer: httpx.Response = served.post("/v1/chat/completions", **asked("x"))
        assert answer.status_code == 400
        assert "takes no tools" in answer.json()["error"]["message"]
    finally:
        bare.chat_template = template


def test_options_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="tool_call_parser must be one of hermes, llama3_json, got 'mistral'"):
        ToolOptions("mistral")
    with pytest.raises(ConfigError, match="needs a tool_call_parser: hermes or llama3_json"):
        ToolOptions(None, auto=True)
