"""Calls in what models write: found whatever the pieces it comes in, and only where there are any."""

import json
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.http.chat import join_parts
from runtime.http.tools.formats import ArrayReader, HermesReader, LlamaReader, NamedReader
from runtime.http.tools.scanner import CallPart, CallReader, ObjectEnd, read_call

Calls = list[tuple[str, str]]
Reader = Callable[[], CallReader]


def read(make: Reader, pieces: Sequence[str]) -> tuple[str, Calls, list[CallPart]]:
    reader = make()
    found = [reader.push(piece) for piece in pieces] + [reader.finish()]
    parts = [part for each in found for part in each.parts]
    return "".join(each.content for each in found), join_parts(parts), parts


def call(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


def hermes(*bodies: str) -> str:
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def thinking() -> HermesReader:
    """Return a reader for answers to prompts that end with `<think>`."""
    return HermesReader(is_thinking=True)


ODD = '{"text": "a </tool_call> \\" } ] \\\\", "deep": {"a": [1, {"b": null}]}, "n": 1.50, "é": "\\u00e9"}'
THOUGHT = "<think>Shall I? <t " + hermes(call("f", "{}")) + " Hm. </think>"
CASES: list[tuple[str, Reader, str, str, Calls]] = [
    ("plain text", HermesReader, "Hello <b> world \n", "Hello <b> world \n", []),
    ("one", HermesReader, hermes(call("f", '{"a": 1}')), "", [("f", '{"a": 1}')]),
    ("odd characters", HermesReader, hermes(call("f", ODD)), "", [("f", ODD)]),
    ("text before", HermesReader, "Let me look.\n" + hermes(call("f", "{}")), "Let me look.", [("f", "{}")]),
    ("text behind", HermesReader, hermes(call("f", "{}")) + "\nDone.", "\nDone.", [("f", "{}")]),
    ("two", HermesReader, hermes(call("f", "{}"), call("g", '{"x":[]}')) + "\n", "", [("f", "{}"), ("g", '{"x":[]}')]),
    ("not closed", HermesReader, "<tool_call>" + call("f", "{}"), "", [("f", "{}")]),
    ("a brace more", HermesReader, f"<tool_call>{call('f', '{}')} }}\n</tool_call> x", " x", [("f", "{}")]),
    ("a brace behind", HermesReader, f"<tool_call>{call('f', '{}')} }} </tool_x>", "} </tool_x>", [("f", "{}")]),
    ("no arguments", HermesReader, hermes('{"name": "f"}'), "", [("f", "{}")]),
    ("cut off", HermesReader, 'hm <tool_call>{"name": "f", "argu', 'hm <tool_call>{"name": "f", "argu', []),
    ("cut mark", HermesReader, "a <tool_c", "a <tool_c", []),
    ("no JSON", HermesReader, "<tool_call>{nonsense}</tool_call>", "<tool_call>{nonsense}</tool_call>", []),
    ("no object", HermesReader, "<tool_call> 17</tool_call>", "<tool_call> 17</tool_call>", []),
    ("python", HermesReader, hermes("f(a=1)"), hermes("f(a=1)"), []),
    ("name missing", HermesReader, hermes('{"arguments": {}}'), hermes('{"arguments": {}}'), []),
    ("name no text", HermesReader, hermes('{"name": 1, "arguments": {}}'), hermes('{"name": 1, "arguments": {}}'), []),
    ("list", HermesReader, hermes(call("f", "[1]")), hermes(call("f", "[1]")), []),
    ("wrong, then right", HermesReader, hermes("{}", call("f", "{}")), "<tool_call>\n{}\n</tool_call>", [("f", "{}")]),
    ("thinking", HermesReader, THOUGHT + "\n\n" + hermes(call("g", "{}")), THOUGHT, [("g", "{}")]),
    ("thinks already", thinking, THOUGHT[7:] + "\n\n" + hermes(call("g", "{}")), THOUGHT[7:], [("g", "{}")]),
    ("thinks to its end", thinking, THOUGHT[7:-1], THOUGHT[7:-1], []),
    ("only thinking", HermesReader, THOUGHT + "\n", THOUGHT + "\n", []),
    ("thinking without end", HermesReader, "\n" + THOUGHT[:-1] + "\n", "\n" + THOUGHT[:-1] + "\n", []),
    ("a word on thinking", HermesReader, "a <think> " + hermes(call("g", "{}")), "a <think>", [("g", "{}")]),
    ("thinking within a call", HermesReader, hermes(call("f", '{"a": "<think>"}')), "", [("f", '{"a": "<think>"}')]),
    ("one", LlamaReader, call("f", '{"a": 1}', "parameters"), "", [("f", '{"a": 1}')]),
    ("tagged", LlamaReader, "<|python_tag|>" + call("f", ODD, "parameters"), "", [("f", ODD)]),
    ("several", LlamaReader, " " + "; ".join([call("f", "{}"), call("g", "{}")]), "", [("f", "{}"), ("g", "{}")]),
    ("plain text", LlamaReader, 'Hi {"name": "f"}', 'Hi {"name": "f"}', []),
    ("other JSON", LlamaReader, '{"a": 1} is JSON', '{"a": 1} is JSON', []),
    ("cut off", LlamaReader, '{"name": "f", "par', '{"name": "f", "par', []),
    ("text behind", LlamaReader, call("f", "{}") + " done", "done", [("f", "{}")]),
    ("nothing", LlamaReader, " \n", " \n", []),
    ("no arguments", LlamaReader, ' {"name": "Alice", "age": 30}', ' {"name": "Alice", "age": 30}', []),
    ("null arguments", LlamaReader, '{"name": "f", "arguments": null}', '{"name": "f", "arguments": null}', []),
    ("tagged text", LlamaReader, '<|python_tag|> {"name": "f"}; x', '<|python_tag|> {"name": "f"}; x', []),
    ("cut off behind a tag", LlamaReader, '<|python_tag|>{"name": "f"', '<|python_tag|>{"name": "f"', []),
    ("a call, then JSON", LlamaReader, call("f", "{}") + '; {"name": "g"}', '{"name": "g"}', [("f", "{}")]),
    ("unknown", lambda: LlamaReader({"g"}), " " + call("f", "{}"), " " + call("f", "{}"), []),
    ("known", lambda: LlamaReader({"f"}), call("f", "{}"), "", [("f", "{}")]),
    ("list", ArrayReader, f"[ {call('f', ODD, 'parameters')} ,\n{call('g', '{}')} ]\n", "", [("f", ODD), ("g", "{}")]),
    ("cut off", ArrayReader, f"[{call('f', '{}')}, " + '{"na', "", [("f", "{}")]),
    ("text behind", ArrayReader, f"[{call('f', '{}')}, ] done [{call('g', '{}')}]", "", [("f", "{}")]),
    ("named", lambda: NamedReader("f"), ODD, "", [("f", ODD)]),
]
IDS = [f"{make.__name__}-{name}" for name, make, *_ in CASES]


@pytest.mark.parametrize(("make", "text", "content", "calls"), [case[1:] for case in CASES], ids=IDS)
def test_calls_are_found_in_whatever_pieces_they_come(make: Reader, text: str, content: str, calls: Calls) -> None:
    assert read(make, [text])[:2] == (content, calls)
    assert read(make, list(text))[:2] == (content, calls)
    dice = random.Random(text)
    for _ in range(20):
        cuts = sorted(dice.choices(range(len(text) + 1), k=5))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        said, found, parts = read(make, pieces)
        assert (said, found) == (content, calls)
        assert [part.index for part in parts if part.name is not None] == list(range(len(calls)))


BITS = [*'<tool_call>/{}[]"\\:, \n\xa0|;xé', "<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>"]
BITS += [call("f", "{}"), call("g", '{"a": "}"}', "parameters"), '{"name": "f"}', '{"x": 1}']
BITS += [f"[{call('f', '{}')}", f"<tool_call>{call('f', '{}')}"]


@given(st.lists(st.lists(st.sampled_from(BITS), max_size=5).map("".join), max_size=8))
def test_no_text_is_lost_or_depends_on_the_pieces(pieces: list[str]) -> None:
    text = "".join(pieces)
    for make in (HermesReader, LlamaReader, ArrayReader):
        content, calls, _ = read(make, list(text))
        assert (content, calls) == read(make, [text])[:2] == read(make, pieces)[:2]
        if make is not ArrayReader and not calls:
            assert content == text


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), json_values, max_size=4), st.booleans(), st.text(alphabet='}"] {x', max_size=5))
def test_the_end_of_an_object(value: dict[str, object], is_ascii: bool, behind: str) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii)
    whole = ObjectEnd()
    assert whole.push(text + behind) == len(text)
    single = ObjectEnd()
    assert [single.push(char) for char in text] == [None] * (len(text) - 1) + [1]


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", '"f"', '{"name": ""}', '{"name": "f", "arguments": "{}"}', "{" * 5000, '{"name": "\ud800"}'],
)
def test_what_is_no_call(text: str) -> None:
    assert read_call(text, "{}") is None


def test_arguments_may_be_missing_only_where_there_is_a_default() -> None:
    assert read_call('{"name": "f"}', "{}") == ("f", "{}")
    assert read_call('{"name": "f"}') is None


def test_text_and_calls_keep_their_order() -> None:
    reader = HermesReader()
    found = reader.push("First. " + hermes(call("f", "{}")) + "Then. " + hermes(call("g", "{}")) + "Done.")
    pieces = [*found.pieces, *reader.finish().pieces]
    calls = [CallPart(0, "f", "{}"), CallPart(1, "g", "{}")]
    assert [piece for piece in pieces if isinstance(piece, CallPart)] == calls
    texts = "".join("|" if isinstance(piece, CallPart) else piece for piece in pieces)
    assert texts == "First.|Then.|Done."
