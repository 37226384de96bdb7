"""`tools` and `tool_choice` of the Messages API, translated to those of chat."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from protos.validation import shown
from runtime.http.tools.choice import NAME_PATTERN, Function, NamedChoice, NamedFunction, Tool, ToolChoice

STRICT = ConfigDict(extra="forbid", strict=True)
CHOICES: dict[str, Literal["auto", "required", "none"]] = {"auto": "auto", "any": "required", "none": "none"}


def _of_the_client(value: object) -> object:
    """Refuse tools that Anthropic defines, by the name of their type."""
    if isinstance(value, dict) and value.get("type") not in (None, "custom"):
        kind = shown(value["type"])
        raise ValueError(f"is of type {kind}, which is not supported: only tools with an input_schema of their own are")
    return value


class InputTool(BaseModel):
    """One entry of `tools`: a tool that the client runs. Hints about caching and streaming have no effect."""

    model_config = STRICT

    name: str = Field(pattern=NAME_PATTERN)
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None

    @model_validator(mode="after")
    def _takes_an_object(self) -> "InputTool":
        if self.input_schema.get("type") != "object":
            raise ValueError("needs an input_schema of type 'object'")
        return self

    def for_chat(self) -> Tool:
        """Return the tool in the form of chat."""
        function = Function(name=self.name, description=self.description, parameters=self.input_schema)
        return Tool(type="function", function=function)


ClientTool = Annotated[InputTool, BeforeValidator(_of_the_client)]


class InputToolChoice(BaseModel):
    """`tool_choice`: whether the answer may or must call a tool, and whether more than one."""

    model_config = STRICT

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_a_tool(self) -> "InputToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise ValueError(f"of type {self.type!r} {'needs' if self.type == 'tool' else 'takes no'} name")
        return self

    def for_chat(self) -> ToolChoice:
        """Return the choice in the form of chat."""
        if self.name is not None:
            return NamedChoice(type="function", function=NamedFunction(name=self.name))
        return CHOICES[self.type]
