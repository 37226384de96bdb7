"""Structured output: turns `StructuredOutputsParams` into a `Grammar`.

`runtime.text.grammar_validator` compiles the grammar before a request is admitted; `workers.sampling.matcher` applies
it while sampling.
"""

import json
import math
from collections.abc import Iterator
from typing import Any

import msgspec

from protos.errors import InvalidRequestError
from protos.messages import Grammar
from protos.sampling import MAX_DEPTH, MAX_GRAMMAR_CHARS, StructuredOutputsParams
from protos.validation import shown

__all__ = ["StructuredOutputsParams", "grammar_of"]

WHITESPACE = r"( |\n( {0,40}|\t{0,12}))?"
"""Default whitespace between the parts of a JSON text: a space, or a line break with indentation."""

NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
LARGEST = (1 << 63) - (1 << 10)
"""The largest integer of 64 bits, with a sign, that float64 holds."""
SMALLEST_STEP = 1e-12
"""By which an exclusive bound is moved inwards; relative to it, if it is larger than 1."""
VALUES = frozenset({"const", "enum", "default", "examples"})


def grammar_of(params: StructuredOutputsParams) -> Grammar:
    """Return the grammar of *params*.

    Raises:
        InvalidRequestError: the schema is not valid JSON, or something is too long or nested too deeply.
    """
    if params.regex is not None:
        return Grammar("regex", _check_brackets(_unanchored(params.regex), "regex"))
    if params.grammar is not None:
        return Grammar("lark", _check_brackets(params.grammar, "grammar"))
    if params.choice is not None:
        return Grammar("regex", _choice_regex(params.choice))
    return Grammar("json_schema", _schema(params))


def _choice_regex(texts: tuple[str, ...]) -> str:
    size = sum(map(len, texts))
    if size > MAX_GRAMMAR_CHARS:
        raise _error(f"choice must have at most {MAX_GRAMMAR_CHARS} characters in all, got {size}")
    if "" in texts:
        raise _error("choice must not hold an empty text: the answer would be empty")
    return "|".join("".join(map(_escaped, text)) for text in dict.fromkeys(texts))


def _escaped(char: str) -> str:
    """Return the regex that matches *char* alone."""
    return char if char.isalnum() else f"\\x{{{ord(char):x}}}"


def _schema(params: StructuredOutputsParams) -> str:
    """Return the schema as JSON text, with the whitespace options under `x-guidance`."""
    schema = {"type": "object"} if params.json is None else _parsed(params.json)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise _error(f"json must be a JSON schema, an object, got {shown(schema)}")
    if _depth(schema) > MAX_DEPTH:
        raise _error(f"json must be nested at most {MAX_DEPTH} levels deep")
    for each in _subschemas(schema):
        if params.disable_additional_properties and "properties" in each:
            each.setdefault("additionalProperties", False)
        _check_values(each)
        _keep_bounds(each)
        if each.get("uniqueItems") is False:  # llguidance refuses the key
            del each["uniqueItems"]
    whitespace = WHITESPACE if params.whitespace_pattern is None else params.whitespace_pattern
    schema["x-guidance"] = (
        {"whitespace_flexible": False}
        if params.disable_any_whitespace
        else {
            "whitespace_flexible": True,
            "whitespace_pattern": whitespace,
        }
    )
    return json.dumps(schema, ensure_ascii=False)


def _parsed(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except RecursionError:
        raise _error(f"json must be nested at most {MAX_DEPTH} levels deep") from None
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise _error(f"json is not valid JSON: {error}") from None


def _depth(value: Any) -> int:
    """Return the nesting depth of objects and lists."""
    depth, level = 0, [value]
    while level := [inner for outer in level for inner in _children(outer)]:
        depth += 1
    return depth


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield *schema* and every schema within it."""
    if isinstance(schema, list):
        for each in schema:
            yield from _subschemas(each)
    if not isinstance(schema, dict):
        return
    yield schema
    for key, inner in schema.items():
        if key in NAMED_SCHEMAS:
            yield from _subschemas(list(_children(inner)))
        elif key not in VALUES:
            yield from _subschemas(inner)


def _check_values(schema: dict[str, Any]) -> None:
    """Raise if llguidance, which computes with float64, would change an integer in `const` or `enum`."""
    values: list[Any] = [schema.get("const"), schema.get("enum")]
    while values:
        value = values.pop()
        values.extend(_children(value))
        if isinstance(value, int) and not _is_exact(value):
            raise _error(f"json has the integer {shown(value)} in const or enum, which float64 cannot hold exactly")


def _is_exact(value: int) -> bool:
    """Return whether llguidance computes with *value* as it is."""
    return abs(value) <= LARGEST and float(value) == value


def _keep_bounds(schema: dict[str, Any]) -> None:
    """Move bounds inwards, as little as possible, that llguidance would overstep.

    Those are integers that float64 cannot hold, and, in version 1.9.1, exclusive integers if the other bound is not an
    integer and there is none between: it allows the bound itself.
    """
    for keys, others, inwards in ((LOWER, UPPER, 1), (UPPER, LOWER, -1)):
        for key, bound in _bounds(schema, keys).items():
            if isinstance(bound, int) and schema.get("type") == "integer":
                schema[key] = _within(bound, inwards)
        exclusive = _bounds(schema, keys[1:]).get(keys[1])
        room = min((inwards * (end - (exclusive or 0)) for end in _bounds(schema, others).values()), default=1)
        if exclusive is not None and exclusive % 1 == 0 and 0 < room < 1:
            step = min(SMALLEST_STEP * max(1, abs(exclusive)), room / 2)
            schema[keys[1]] = exclusive + inwards * step


def _bounds(schema: dict[str, Any], keys: tuple[str, ...]) -> dict[str, float]:
    """Return those of *keys* that are numbers; in older schemas `exclusiveMinimum` is a boolean."""
    found = {key: schema.get(key) for key in keys}
    return {key: each for key, each in found.items() if isinstance(each, int | float) and not isinstance(each, bool)}


def _within(bound: int, inwards: int) -> int:
    """Return the integer nearest to *bound*, upwards if *inwards* is 1 and downwards if it is -1, that is exact."""
    if bound * inwards > LARGEST:
        raise _error(f"json has the bound {shown(bound)}; integers must lie within 64 bits")
    if bound * inwards < -LARGEST:
        return -LARGEST * inwards
    found = float(bound)
    is_inside = (int(found) - bound) * inwards >= 0
    return int(found if is_inside else math.nextafter(found, inwards * math.inf))


def _unanchored(regex: str) -> str:
    """Remove leading and trailing anchors: the regex is matched against the whole answer anyway."""
    end = regex[:-1] if regex.endswith("$") and (len(regex) - len(regex[:-1].rstrip("\\"))) % 2 else regex
    return end.removeprefix("^")


def _check_brackets(text: str, param: str) -> str:
    """Return *text*; raise if its brackets are nested too deeply, escaped and quoted ones included."""
    depth = deepest = 0
    for char in text:
        if char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}":
            depth = max(0, depth - 1)
    if deepest > MAX_DEPTH:
        raise _error(f"{param} must have brackets at most {MAX_DEPTH} deep, got {deepest}")
    return text


def _error(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"structured_outputs: {message}", "structured_outputs")
