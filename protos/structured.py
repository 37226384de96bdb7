"""Structured output: what a user may ask of the form of an answer, and what is told of it to the target's sampler.

The shape of `StructuredOutputsParams` is vLLM's. Whether a grammar means anything, `runtime.text.grammar_validator`
finds out before a request is admitted; what it allows at each position, `workers.sampling.matcher` does.
"""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from protos.errors import InvalidRequestError
from protos.validation import request_error, shown, typed

MAX_GRAMMAR_CHARS = 1 << 18
MAX_REGEX_CHARS = 1 << 14
MAX_CHOICES = 4096
MAX_DEPTH = 96
"""Of a JSON schema, and of brackets in a regular expression or a grammar: parsers descend into both."""

WHITESPACE = r"( |\n( {0,40}|\t{0,12}))?"
"""Between the parts of a JSON text where nothing else is said: a space, or one line's end and its indentation."""

Kind = Literal["json_schema", "regex", "lark"]
NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
VALUES = frozenset({"const", "enum", "default", "examples"})
SOURCES = ("json", "regex", "choice", "grammar", "json_object")


class Grammar(msgspec.Struct, frozen=True, gc=False):
    """The form that an answer must have, as the grammar library reads it: see `protos.guidance`."""

    kind: Kind
    text: str


Source = Annotated[str, Field(max_length=MAX_GRAMMAR_CHARS)]


def _as_json(value: object) -> object:
    """Let schemas be dictionaries, text or pydantic models."""
    if isinstance(value, type) and hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    if not isinstance(value, dict | bool):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise ValueError(f"must be nested at most {MAX_DEPTH} levels deep") from None
    except (TypeError, ValueError):
        raise ValueError("must be a JSON schema: a dictionary of JSON values, or JSON text") from None


def _without_backend(given: dict[str, Any]) -> dict[str, Any]:
    """Drop vLLM's choice of a library; refuse what this one is not asked for."""
    if given.get("structural_tag") is not None:
        raise InvalidRequestError("structural_tag is not supported: write a grammar", "structured_outputs")
    foreign = {"structural_tag", "disable_fallback", "_backend", "_backend_was_auto"}
    return {name: value for name, value in given.items() if name not in foreign}


def _structured_error(message: str, param: str | None) -> Exception:
    """Of all that can be wrong here, the request's field is `structured_outputs`."""
    return request_error(f"structured_outputs: {message}", "structured_outputs")


@typed(_structured_error, _without_backend)
@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class StructuredOutputsParams:
    """The form of an answer, under vLLM's names; exactly one of the first five is given.

    `json` is a JSON schema: a dictionary, JSON text or a pydantic model class. `regex` is matched from end to end, in
    the dialect of Rust's `regex` (no look-around, no back-references). `choice` lists texts of which one is the answer.
    `grammar` is a context-free grammar in the Lark dialect of llguidance. `json_object` asks for any JSON object.

    For JSON: `disable_any_whitespace` leaves none between its parts, `whitespace_pattern` says as a regex what may
    stand there (a space, or a line's end and indentation, where nothing is said), and `disable_additional_properties`
    forbids in every object what its schema does not name.

    Raises:
        InvalidRequestError: names the value and the limit; `param` is "structured_outputs".
    """

    json: Annotated[Source | None, BeforeValidator(_as_json)] = None
    regex: str | None = Field(default=None, max_length=MAX_REGEX_CHARS)
    choice: tuple[str, ...] | None = Field(default=None, min_length=1, max_length=MAX_CHOICES)
    grammar: Source | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = Field(default=None, max_length=256)

    @model_validator(mode="after")
    def _agree(self) -> "StructuredOutputsParams":
        given = [name for name in SOURCES if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(f"exactly one of {', '.join(SOURCES)} must be given, got {' and '.join(given) or 'none'}")
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise ValueError("whitespace_pattern and disable_any_whitespace contradict each other")
        return self


def grammar_of(asked: StructuredOutputsParams) -> Grammar:
    """Return what *asked* comes down to.

    Raises:
        InvalidRequestError: the schema is no JSON, or something is too long or nested too deeply.
    """
    if asked.regex is not None:
        return Grammar("regex", _shallow(_unanchored(asked.regex), "regex"))
    if asked.grammar is not None:
        return Grammar("lark", _shallow(asked.grammar, "grammar"))
    if asked.choice is not None:
        return Grammar("regex", _one_of(asked.choice))
    return Grammar("json_schema", _schema(asked))


def _one_of(texts: tuple[str, ...]) -> str:
    size = sum(map(len, texts))
    if size > MAX_GRAMMAR_CHARS:
        raise _refusal(f"choice must have at most {MAX_GRAMMAR_CHARS} characters in all, got {size}")
    if "" in texts:
        raise _refusal("choice must not hold an empty text: there would be nothing to answer")
    return "|".join("".join(map(_spelt, text)) for text in dict.fromkeys(texts))


def _spelt(char: str) -> str:
    """Return the regex that matches *char* alone."""
    return char if char.isalnum() else f"\\x{{{ord(char):x}}}"


def _schema(asked: StructuredOutputsParams) -> str:
    """Return the schema as JSON text that says how much whitespace there may be."""
    schema = {"type": "object"} if asked.json is None else _parsed(asked.json)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise _refusal(f"json must be a JSON schema, an object, got {shown(schema)}")
    if _depth(schema) > MAX_DEPTH:
        raise _refusal(f"json must be nested at most {MAX_DEPTH} levels deep")
    if asked.disable_additional_properties:
        _close_objects(schema)
    whitespace = WHITESPACE if asked.whitespace_pattern is None else asked.whitespace_pattern
    schema["x-guidance"] = (
        {"whitespace_flexible": False}
        if asked.disable_any_whitespace
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
        raise _refusal(f"json must be nested at most {MAX_DEPTH} levels deep") from None
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise _refusal(f"json is not valid JSON: {error}") from None


def _depth(value: Any) -> int:
    """Return how many objects and lists lie around the innermost value."""
    depth, level = 0, [value]
    while level := [inner for outer in level for inner in _inside(outer)]:
        depth += 1
    return depth


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _close_objects(schema: Any) -> None:
    """Forbid what is not named, in every object that names something and does not say whether there may be more."""
    if isinstance(schema, list):
        for each in schema:
            _close_objects(each)
    if not isinstance(schema, dict):
        return
    if "properties" in schema:
        schema.setdefault("additionalProperties", False)
    for key, inner in schema.items():
        if key in NAMED_SCHEMAS:
            _close_objects(list(_inside(inner)))
        elif key not in VALUES:
            _close_objects(inner)


def _unanchored(regex: str) -> str:
    """Leave out the anchors that say what is so anyway: that the whole answer is matched."""
    end = regex[:-1] if regex.endswith("$") and (len(regex) - len(regex[:-1].rstrip("\\"))) % 2 else regex
    return end.removeprefix("^")


def _shallow(text: str, param: str) -> str:
    """Return *text*; refuse it where its brackets are nested too deeply, whether they are meant as brackets or not."""
    depth = deepest = 0
    for char in text:
        if char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}":
            depth = max(0, depth - 1)
    if deepest > MAX_DEPTH:
        raise _refusal(f"{param} must have brackets at most {MAX_DEPTH} deep, got {deepest}")
    return text


def _refusal(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"structured_outputs: {message}", "structured_outputs")
