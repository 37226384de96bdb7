"""JSON schemas whose grammars need care: bounds and values of numbers, and the parameters of functions."""

import json
import re
from typing import Any

import jsonschema
import pytest

from protos.errors import InvalidRequestError
from protos.guidance import matcher
from protos.sampling import SamplingParams
from protos.structured import StructuredOutputsParams, grammar_of
from runtime.http.tools.choice import Tool, ToolOptions, tool_use
from tests.support.structured import tokenizer, words


def accepts(params: StructuredOutputsParams, text: str) -> bool:
    """Return whether *text* is a whole answer."""
    found = matcher(grammar_of(params), words())
    ids = tokenizer().encode(text, add_special_tokens=False)
    return found.try_consume_tokens(ids) == len(ids) and found.is_accepting()


NUMBERS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "0.1", "0.0001"], ["0", "0.0", "0.6"]),
    ({"type": "number", "exclusiveMinimum": 3, "exclusiveMaximum": 3.5}, ["3.2"], ["3", "3.5"]),
    ({"type": "number", "minimum": -1.5, "exclusiveMaximum": -1}, ["-1.5", "-1.2"], ["-1", "-1.0"]),
    ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, ["-0.5", "-0.1"], ["0", "-0"]),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 1.5}, ["0.1", "1", "1.5"], ["0", "1.6"]),
    ({"type": "integer", "minimum": 2**53 + 1}, [str(2**53 + 2)], [str(2**53)]),
    ({"type": "integer", "maximum": -(2**53) - 1}, [str(-(2**53) - 2)], [str(-(2**53))]),
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, ["0", str(2**62)], [str(2**63)]),
    ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, ["0", "7"], ["-1"]),
    ({"type": "integer", "minimum": -(2**70)}, ["-7", "7"], ["0.5"]),
    ({"type": "number", "exclusiveMinimum": 10**13, "maximum": 10**13 + 0.5}, ["10000000000000.4"], ["10000000000000"]),
    ({"enum": [2**53, True, 1.5]}, [str(2**53), "true", "1.5"], [str(2**53 + 1)]),
    ({"type": "array", "uniqueItems": False, "items": {"type": "integer"}}, ["[1,1]"], ['["a"]']),
    ({"properties": {"uniqueItems": {"const": False}, "enum": {"enum": [1]}}}, ['{"enum":1}'], ['{"enum":2}']),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), NUMBERS, ids=lambda value: str(value)[:60])
def test_bounds_and_values_are_kept(schema: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    """llguidance alone allows some bounds that are excluded, and changes large integers."""
    for text in right + wrong:
        assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)) == (text in right)
        assert accepts(StructuredOutputsParams(json=schema), text) == (text in right), text


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"enum": [1, 2**53 + 1]}, "json has the integer 9007199254740993 in const or enum"),
        ({"properties": {"id": {"const": {"a": [10**22 + 1]}}}}, "json has the integer 10000000000000000000001 in"),
        ({"type": "integer", "minimum": 2**63}, "json has the bound 9223372036854775808; integers must lie within"),
    ],
    ids=str,
)
def test_integers_that_would_be_changed_are_refused(schema: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(says)):
        grammar_of(StructuredOutputsParams(json=schema))


def test_exclusive_bounds_of_older_schemas_are_left_alone() -> None:
    """They are booleans."""
    for is_exclusive in (True, False):
        schema = {"minimum": 0, "exclusiveMinimum": is_exclusive, "maximum": 1.5}
        assert json.loads(grammar_of(StructuredOutputsParams(json=schema)).text).items() >= schema.items()


def function(name: str, parameters: dict[str, Any]) -> Tool:
    return Tool.model_validate({"type": "function", "function": {"name": name, "parameters": parameters}})


def calling(*tools: Tool) -> StructuredOutputsParams:
    """Return the structured output under `tool_choice` required."""
    params = tool_use(tools, "required", ToolOptions(), is_parallel=True).constrained(SamplingParams())
    assert params.structured_outputs is not None
    return params.structured_outputs


def call(name: str, parameters: object) -> str:
    return json.dumps([{"name": name, "parameters": parameters}], separators=(",", ":"))


LINKED = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["v", "next"],
    "additionalProperties": False,
}


def item(kind: str, **more: Any) -> dict[str, Any]:
    """Return parameters that define an `Item` of their own."""
    properties = {"item": {"$ref": "#/$defs/Item"}, "again": {"$ref": "#/properties/item"}}
    return {"type": "object", "properties": properties, "required": ["item"], "$defs": {"Item": {"type": kind}}, **more}


def test_references_are_of_the_function_they_are_in() -> None:
    older = {"properties": {"item": {"$ref": "#/definitions/Item"}}, "definitions": {"Item": {"type": "null"}}}
    twice = {"$id": "https://example.com/item"}
    asked = calling(
        function("linked", LINKED),
        function("number", item("integer", **twice)),
        function("text", item("string", **twice)),
        function("older", older),
    )
    assert accepts(asked, call("linked", {"v": 1, "next": {"v": 2, "next": None}}))
    assert not accepts(asked, call("linked", {"v": 1, "next": [{"name": "linked", "parameters": {}}]}))
    assert accepts(asked, call("number", {"item": 1, "again": 2}))
    assert not accepts(asked, call("number", {"item": "a"}))
    assert accepts(asked, call("text", {"item": "a"}))
    assert not accepts(asked, call("text", {"item": "a", "again": 2}))
    assert accepts(asked, call("older", {"item": None}))


def test_older_drafts_in_which_ids_beside_references_do_not_count() -> None:
    number = {"N": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}
    older = {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/N", "definitions": number}
    asked = calling(function("f", older))
    assert accepts(asked, call("f", {"a": 1}))
    assert not accepts(asked, call("f", {"a": "b"}))


def test_one_id_for_two_definitions_is_refused() -> None:
    def tool(name: str, kind: str) -> Tool:
        definitions = {"X": {"$id": "https://example.com/x", "type": kind}}
        return function(name, {"type": "object", "$defs": definitions})

    calling(tool("f", "integer"), tool("g", "integer"))
    with pytest.raises(InvalidRequestError, match=r"two functions define the \$id 'https://example.com/x'"):
        calling(tool("f", "integer"), tool("g", "string"))


@pytest.mark.parametrize("given", [{}, {"type": ["object", "null"]}], ids=str)
def test_arguments_are_an_object_where_the_schema_does_not_say_so(given: dict[str, Any]) -> None:
    parameters = {**given, "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    asked = calling(function("f", parameters))
    assert accepts(asked, call("f", {"a": 1}))
    assert not any(accepts(asked, call("f", wrong)) for wrong in (85, None, "a", [1], {"a": "b"}))


def test_parameters_of_another_type_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="parameters of f must be of type object, got 'string'") as caught:
        calling(function("f", {"type": "string"}))
    assert caught.value.param == "tools"


@pytest.mark.parametrize(
    "name", ['a"b', "a\\b", '\\"', "a/b", "tab\there", "line\nline", "nul\x01", "\x7f", "é", "漢", "\U0001f600", ""]
)
def test_names_are_those_of_the_schema_however_they_are_written(name: str) -> None:
    schema = {"type": "object", "properties": {name: {"type": "integer"}}, "additionalProperties": {"type": "boolean"}}
    params = StructuredOutputsParams(json=schema)
    assert accepts(params, json.dumps({name: 1}, ensure_ascii=False))
    assert not accepts(params, json.dumps({name: True}, ensure_ascii=False))
    assert accepts(params, '{"z": true}')
