"""Structured outputs: every way to request a form, and forms that are refused."""

import json
from typing import Any

import msgspec
import pydantic
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from protos.errors import InvalidRequestError
from protos.guidance import GrammarError, matcher, vocabulary
from protos.messages import Grammar, Request
from protos.sampling import MAX_DEPTH, SamplingParams
from protos.structured import StructuredOutputsParams, grammar_of
from runtime.http.schemas import ChatCompletionRequest, CompletionRequest
from runtime.text.grammar_validator import GrammarChecker
from runtime.text.preprocessor import Preprocessor
from tests.support.structured import EOS, FORMS, PERSON, tokenizer, vocab_size
from workers.sampling.matcher import GrammarMatcher

DEEP = "[" * 30_000 + "]" * 30_000
BIG = "x" * (10 << 20)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


# Parameters, and words of the error.
UNASKABLE: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "exactly one of json, regex, choice, grammar, json_object must be given, got none"),
    "two things": ({"json": {}, "regex": "a"}, "got json and regex"),
    "not even that": ({"json_object": False}, "got none"),
    "an unknown field": ({"regexp": "a"}, "unknown argument 'regexp', did you mean 'regex'?"),
    "no JSON": ({"json": "{"}, "json is not valid JSON"),
    "no schema": ({"json": "[1]"}, "json must be a JSON schema, an object, got [1]"),
    "what JSON has not": ({"json": {"enum": [{1}]}}, "a dictionary of JSON values"),
    "infinity": ({"json": {"maximum": float("inf")}}, "a dictionary of JSON values"),
    "no choice": ({"choice": []}, "choice must have at least 1 item(s), got 0 items"),
    "an empty choice": ({"choice": ["a", ""]}, "the answer would be empty"),
    "many choices": ({"choice": ["a"] * 5000}, "choice must have at most 4096 items, got 5000 items"),
    "long choices": ({"choice": ["a" * 1000] * 300}, "at most 262144 characters in all, got 300000"),
    "a long regex": ({"regex": "a" * 20_000}, "regex must have at most 16384 characters"),
    "a deep regex": ({"regex": "(" * 8000 + ")" * 8000}, f"regex must have brackets at most {MAX_DEPTH} deep"),
    "a deep grammar": ({"grammar": "start: " + DEEP}, f"brackets at most {MAX_DEPTH} deep, got 30000"),
    "a deep schema": ({"json": nested(MAX_DEPTH)}, f"json must be nested at most {MAX_DEPTH} levels deep"),
    "a schema as deep as can be": ({"json": '{"items":' * 20_000 + "{}" + "}" * 20_000}, "levels deep"),
    "10 MB": ({"json": BIG}, "json must have at most 262144 characters"),
    "10 MB of a dictionary": ({"json": {"const": BIG}}, "json must have at most 262144 characters"),
    "two whitespaces": ({"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}, "contradict"),
    "a structural tag": ({"structural_tag": "{}"}, "structural_tag is not supported"),
    "lone surrogates": ({"regex": "\ud800"}, "lone surrogates"),
}


@pytest.mark.parametrize("case", UNASKABLE)
def test_what_cannot_be_asked(case: str) -> None:
    asked, said = UNASKABLE[case]
    with pytest.raises(InvalidRequestError) as caught:
        grammar_of(SamplingParams(structured_outputs=asked).structured_outputs or StructuredOutputsParams())
    assert caught.value.param == "structured_outputs"
    assert said in str(caught.value)
    assert len(str(caught.value)) < 400


EASY = Grammar("regex", "b+")


# Ways to request a form.


VERDICT = pydantic.create_model("Verdict", answer=(str, ...))


def test_schemas_are_told_as_text_dictionaries_or_classes() -> None:
    asked = [StructuredOutputsParams(json=schema) for schema in (PERSON, json.dumps(PERSON))]
    assert grammar_of(asked[0]) == grammar_of(asked[1])
    assert '"answer"' in grammar_of(StructuredOutputsParams(json=VERDICT)).text  # type: ignore[arg-type]
    assert '"type": "object"' in grammar_of(StructuredOutputsParams(json_object=True)).text
    assert grammar_of(StructuredOutputsParams(json="true")).kind == "json_schema"


def test_objects_are_closed_where_it_is_asked_and_values_are_left_alone() -> None:
    is_open = {"properties": {}, "additionalProperties": True}
    schema = {
        "properties": {"properties": {"type": "string"}, "open": is_open},
        "$defs": {"a": {"properties": {}}},
        "default": {"properties": 1},
    }
    found = json.loads(grammar_of(StructuredOutputsParams(json=schema, disable_additional_properties=True)).text)
    assert found["additionalProperties"] is found["$defs"]["a"]["additionalProperties"] is False
    assert found["properties"].keys() == {"properties", "open"}
    assert found["properties"]["open"]["additionalProperties"] is True
    assert found["default"] == {"properties": 1}


@pytest.mark.parametrize(("regex", "text"), [("^a$", "a"), (r"a\$", r"a\$"), (r"a\\$", r"a\\"), ("^", "")])
def test_anchors_say_what_is_so_anyway(regex: str, text: str) -> None:
    assert grammar_of(StructuredOutputsParams(regex=regex)) == Grammar("regex", text)


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "text": ({"response_format": {"type": "text"}}, None),
    "object": ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    "schema": ({"response_format": {"type": "json_schema", "json_schema": {
        "name": "person", "description": "who", "schema": PERSON, "strict": True}}}, {"json": PERSON}),
    "any JSON": ({"response_format": {"type": "json_schema", "json_schema": {"name": "any"}}}, {"json": True}),
    "extra body": ({"structured_outputs": {"regex": "a"}}, {"regex": "a"}),
    "older JSON": ({"guided_json": PERSON, "guided_whitespace_pattern": " "},
                   {"json": PERSON, "whitespace_pattern": " "}),
    "older regex": ({"guided_regex": "a"}, {"regex": "a"}),
    "older choice": ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
    "older grammar": ({"guided_grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_ask(way: str) -> None:
    fields, form = WAYS[way]
    wanted = None if form is None else StructuredOutputsParams(**form)
    completion = CompletionRequest.model_validate({"prompt": "a", **fields})
    assert completion.completion_sampling({}).structured_outputs == wanted
    chat = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "a"}], **fields})
    assert chat.chat_sampling({}).structured_outputs == wanted


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format", "one of them"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "structured_outputs", "one of them"),
        ({"guided_regex": "a", "guided_json": "{}"}, "structured_outputs", "got json and regex"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema"),
        (
            {"response_format": {"type": "text", "json_schema": {"name": "a"}}},
            "response_format",
            "takes no json_schema",
        ),
    ],
)
def test_ways_that_contradict_each_other(fields: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        CompletionRequest.model_validate({"prompt": "a", **fields}).completion_sampling({})
    assert caught.value.param == param
    assert said in str(caught.value)


def test_requests_carry_grammars_across_processes() -> None:
    preprocessor = Preprocessor(tokenizer(), vocab_size=vocab_size(), max_model_len=64, capacity=64, eos_ids=(EOS,))
    asked = SamplingParams(structured_outputs=FORMS["json"].asked, n=2)
    made = preprocessor.requests("a", asked, "1")
    assert [each.sampling.grammar for each in made] == [FORMS["json"].grammar] * 2
    assert [msgspec.msgpack.decode(msgspec.msgpack.encode(each), type=Request) for each in made] == made
    preprocessor.grammars.close()


# Tokenizers.


def sentencepiece_like() -> Tokenizer:
    """Pieces with a mark for spaces, and single bytes for what they do not spell."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab"]
    backend = Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)},
            [("▁", "a"), ("a", "b")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.enable_padding(length=40)
    return backend


def spelt(backend: Tokenizer, grammar: Grammar) -> bytes:
    """Follow a grammar that allows one text only, by the first id that is allowed."""
    import numpy as np

    size, tokens = backend.get_vocab_size(), []
    follower = GrammarMatcher(matcher(grammar, vocabulary(backend.to_str(), size + 5, (2,))), size + 5, (2,))
    while tokens[-1:] != [2]:
        bits = follower.allowed(0, tokens)
        tokens.append(int(np.flatnonzero(np.unpackbits(bits, count=size + 5, bitorder="little"))[0]))
    pieces = [backend.id_to_token(token) for token in tokens[:-1]]
    return b"".join(
        bytes([int(piece[3:5], 16)]) if piece.startswith("<0x") else piece.replace("▁", " ").encode()
        for piece in pieces
    )


def test_tokenizers_that_spell_spaces_and_bytes() -> None:
    assert spelt(sentencepiece_like(), Grammar("regex", " ab aé")) == " ab aé".encode()


def test_tokenizers_that_do_not_spell_texts_are_refused() -> None:
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "word": 1, "</s>": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(GrammarError, match="not available with this tokenizer"):
        vocabulary(backend.to_str(), 3, (2,))
    with pytest.raises(GrammarError, match="no end-of-sequence token"):
        vocabulary(tokenizer().backend_tokenizer.to_str(), vocab_size(), ())
    lost = type("Lost", (), {"backend_tokenizer": backend})()
    with pytest.raises(InvalidRequestError, match="not available with this tokenizer"):
        GrammarChecker(lost, 3, (2,)).check(EASY)
