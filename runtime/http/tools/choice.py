"""`tools` and `tool_choice`: the functions in the prompt, and the calls an answer may or must contain."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from protos.errors import ConfigError, InvalidRequestError
from protos.sampling import SamplingParams, StructuredOutputsParams
from protos.validation import shown
from runtime.http.tools.formats import PARSERS, THINK, ArrayReader, NamedReader
from runtime.http.tools.scanner import CallReader

MAX_TOOLS = 128
NAME_PATTERN = r"^[a-zA-Z0-9_.-]{1,128}$"
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}

Mode = Literal["none", "auto", "required", "named"]


class Function(BaseModel):
    """A function; `parameters` is a JSON schema.

    Required calls follow the schema, also without `strict`; calls under `tool_choice` auto may not.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(pattern=NAME_PATTERN)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """One entry of `tools`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """Return the tool as the chat template gets it."""
        function = self.function
        described = {} if function.description is None else {"description": function.description}
        parameters = function.parameters or NO_PARAMETERS
        return {"type": self.type, "function": {"name": function.name, **described, "parameters": parameters}}


class NamedFunction(BaseModel):
    """The function of a `tool_choice`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str


class NamedChoice(BaseModel):
    """A `tool_choice` of one function."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    function: NamedFunction


def _checked_choice(value: object) -> object:
    if value is None or value in ("none", "auto", "required"):
        return value
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if isinstance(name, str) and value == {"type": "function", "function": {"name": name}}:
        return value
    raise ValueError('must be none, auto, required or {"type": "function", "function": {"name": ...}}')


ToolChoice = Annotated[Literal["none", "auto", "required"] | NamedChoice, BeforeValidator(_checked_choice)]


@dataclass(frozen=True)
class ToolOptions:
    """The server's options for tools: `parser` names the format of calls, `auto` allows `tool_choice` auto.

    Raises:
        ConfigError: the parser is unknown, or missing although `auto` is set.
    """

    parser: str | None = None
    auto: bool = False

    def __post_init__(self) -> None:
        if self.parser is not None and self.parser not in PARSERS:
            raise ConfigError(f"tool_call_parser must be one of {', '.join(PARSERS)}, got {shown(self.parser)}")
        if self.auto and self.parser is None:
            raise ConfigError(f"enable_auto_tool_choice needs a tool_call_parser: {' or '.join(PARSERS)}")


@dataclass(frozen=True)
class ToolUse:
    """The tools of one request and how they may be called. `is_thinking`: its prompt opens the model's thoughts."""

    tools: tuple[Tool, ...] = ()
    mode: Mode = "none"
    name: str = ""
    parser: str = ""
    is_parallel: bool = True
    is_thinking: bool = False

    @property
    def template_options(self) -> dict[str, Any]:
        """The chat template's `tools`; empty if calls are off."""
        return {} if self.mode == "none" else {"tools": [tool.for_template() for tool in self.tools]}

    def after(self, prompt: str) -> "ToolUse":
        """Return the same for answers to *prompt*, which a template may have ended with `<think>`."""
        return replace(self, is_thinking=prompt.rstrip().endswith(THINK))

    def reader(self) -> CallReader | None:
        """Return a reader of the calls in one answer; None if calls are off."""
        if self.mode == "named":
            return NamedReader(self.name)
        if self.mode == "required":
            return ArrayReader()
        names = {tool.function.name for tool in self.tools}
        return PARSERS[self.parser](names, self.is_thinking) if self.mode == "auto" else None

    def constrained(self, params: SamplingParams) -> SamplingParams:
        """Return *params* with the structured output that enforces the calls.

        Raises:
            InvalidRequestError: *params* have a structured output of their own, or a function takes no object.
        """
        if self.mode == "none":
            return params
        if params.structured_outputs is not None:
            raise InvalidRequestError(
                "response_format and structured_outputs do not go together with tools: an answer in that form cannot "
                "be a call; leave one of them out, or set tool_choice to none",
                "tools",
            )
        if self.mode == "auto":
            # In some vocabularies the tags around a call are special tokens.
            return replace(params, skip_special_tokens=False)
        return replace(params, structured_outputs=StructuredOutputsParams(json=self._schema()))

    @contextlib.contextmanager
    def error_context(self) -> Iterator[None]:
        """Reword errors about the structured output of `constrained` as errors about the tools."""
        try:
            yield
        except InvalidRequestError as error:
            if self.mode not in ("required", "named") or error.param != "structured_outputs":
                raise
            reason = str(error).removeprefix("structured_outputs: ")
            raise InvalidRequestError(f"tools cannot be called as they are described: {reason}", "tools") from None

    def _schema(self) -> Any:
        """Return the schema of the named function's arguments, or of a list of calls."""
        if self.mode == "named":
            return next(_parameters(tool) for tool in self.tools if tool.function.name == self.name)
        return _calls_of(self.tools, is_parallel=self.is_parallel)


def tool_use(
    tools: Sequence[Tool] | None, choice: ToolChoice | None, options: ToolOptions, *, is_parallel: bool
) -> ToolUse:
    """Return the `ToolUse` of a request's `tools` and `tool_choice`.

    Raises:
        InvalidRequestError: the choice does not match the tools, or the server does not allow it.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequestError("tool_choice requires a call, but there are no tools", "tool_choice")
        return ToolUse()
    _check(tools)
    checked = tuple(tools)
    if isinstance(choice, NamedChoice):
        name = choice.function.name
        if name not in {tool.function.name for tool in checked}:
            raise InvalidRequestError(f"tool_choice names {shown(name)}, which is not among the tools", "tool_choice")
        return ToolUse(checked, "named", name)
    if choice == "required":
        return ToolUse(checked, "required", is_parallel=is_parallel)
    if choice == "none":
        return ToolUse(checked)
    if not options.auto or options.parser is None:
        raise InvalidRequestError(
            "tools with tool_choice auto need a server started with --enable-auto-tool-choice and --tool-call-parser; "
            "this one takes a tool_choice that requires a call or forbids it",
            "tool_choice",
        )
    return ToolUse(checked, "auto", parser=options.parser, is_parallel=is_parallel)


def _check(tools: Sequence[Tool]) -> None:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"tools must have at most {MAX_TOOLS} entries, got {len(tools)}", "tools")
    names = [tool.function.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidRequestError(f"tools names the function {shown(twice)} twice", "tools")


def _parameters(tool: Tool) -> dict[str, Any]:
    """Return the schema of a function's arguments, which are an object even if its own does not say so."""
    given = tool.function.parameters or {**NO_PARAMETERS, "additionalProperties": False}
    kind = given.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        name = tool.function.name
        raise InvalidRequestError(f"tools: parameters of {name} must be of type object, got {shown(kind)}", "tools")
    return {**given, "type": "object"}


def _calls_of(tools: Sequence[Tool], *, is_parallel: bool) -> dict[str, Any]:
    """Return the schema of a list of calls.

    Raises:
        InvalidRequestError: parameters are no object, or two functions give one `$id` to different schemas.
    """
    _check_ids(tools)
    calls = [_call_of(tool, number) for number, tool in enumerate(tools)]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not is_parallel:
        schema["maxItems"] = 1
    return schema


def _call_of(tool: Tool, number: int) -> dict[str, Any]:
    # An id of its own makes it the root of its references. In older drafts, an id beside a reference does not count.
    parameters = {**_parameters(tool), "$id": f"urn:slipstream:tool:{number}"}
    parameters.pop("$schema", None)
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _check_ids(tools: Sequence[Tool]) -> None:
    """Check that what the functions define under one `$id` is the same; the ids of whole parameters do not matter."""
    seen: dict[str, Any] = {}
    for tool in tools:
        values: list[Any] = [*_parameters(tool).values()]
        while values:
            value = values.pop()
            values.extend(value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())
            name = value.get("$id") if isinstance(value, dict) else None
            if isinstance(name, str) and seen.setdefault(name, value) != value:
                raise InvalidRequestError(
                    f"tools: two functions define the $id {shown(name)}, each in its own way; name them apart", "tools"
                )
