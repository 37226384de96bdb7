"""The request body of `POST /v1/responses`, and its translation into a chat request."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field

from protos.errors import InvalidRequestError
from protos.validation import shown
from runtime.http.fields.structured import JsonSchemaFormat, Name, ResponseFormat
from runtime.http.fields.unsupported import NEUTRAL, NO_TOOLS, Neutral
from runtime.http.responses_api.items import messages_of
from runtime.http.schemas import STRICT, ChatCompletionRequest, RequestBody, SamplingFields
from runtime.http.tools.choice import Function, NamedFunction, Tool

LOGPROBS = "message.output_text.logprobs"
NO_EFFECT = frozenset({"access_programs", "image", "max_tool_calls", "reasoning", "stream_options"})
UNSHOWN = {"defer_loading", "allowed_callers", "output_schema"}
"""Fields of tools that are not repeated in a response."""
CHAT_NAMES = {
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "logprobs": "top_logprobs",
}
"""Fields of chat requests in messages, and their names here."""

CHAT_PARAMS = {**CHAT_NAMES, "messages": "input", "prompt": "input"}
CHAT_NAME = re.compile(rf"\b({'|'.join(CHAT_NAMES)})\b")


def _only_functions(value: object) -> object:
    kind = value.get("type") if isinstance(value, dict) else "function"
    if kind != "function":
        raise ValueError(f"has type {shown(kind)}, which is not supported: only function tools are")
    return value


class FunctionTool(Function):
    """One entry of `tools`. What its results are like has no effect."""

    type: Literal["function"]
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    output_schema: dict[str, Any] | None = None

    def chat(self) -> Tool:
        """Return the tool as chat requests have it."""
        function = Function.model_construct(**{name: getattr(self, name) for name in Function.model_fields})
        return Tool(type="function", function=function)


class FunctionChoice(NamedFunction):
    """A `tool_choice` of one function."""

    type: Literal["function"]


def _checked_choice(value: object) -> object:
    if value is None or value in ("none", "auto", "required"):
        return value
    name = value.get("name") if isinstance(value, dict) else None
    if isinstance(name, str) and value == {"type": "function", "name": name}:
        return value
    raise ValueError('must be none, auto, required or {"type": "function", "name": ...}')


class TextFormat(BaseModel):
    """The `format` of `text`."""

    model_config = STRICT

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    def chat(self) -> ResponseFormat:
        """Return the format as chat requests have it. Raises `InvalidRequestError`."""
        if self.type != "json_schema":
            return ResponseFormat(type=self.type)
        if self.name is None or self.json_schema is None:
            raise InvalidRequestError("text.format of type 'json_schema' needs name and schema", "text.format")
        return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=self.json_schema))


class TextOptions(BaseModel):
    """The field `text`; `verbosity` has no effect."""

    model_config = STRICT

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(RequestBody, SamplingFields):
    """The body of `POST /v1/responses`."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextOptions | None = None
    structured_outputs: dict[str, Any] | None = None
    tools: list[Annotated[FunctionTool, BeforeValidator(_only_functions)]] | None = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | FunctionChoice | None, BeforeValidator(_checked_choice)
    ] = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None

    neutral: ClassVar[Neutral] = {
        "store": (None, False),
        "previous_response_id": (None,),
        "conversation": (None,),
        "background": (None, False),
        "prompt": (None,),
        "context_management": (None, []),
        "chat_template": NEUTRAL["chat_template"],
        "chat_template_kwargs": NO_TOOLS["chat_template_kwargs"],
    }

    @classmethod
    def screened(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        """See `RequestBody`."""
        return {name: value for name, value in super().screened(fields).items() if name not in NO_EFFECT}

    @property
    def wants_logprobs(self) -> bool:
        """Whether the response has log-probabilities."""
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def chat(self) -> ChatCompletionRequest:
        """Return the same request as one for a chat completion. Raises `InvalidRequestError`."""
        response_format = None if self.text is None or self.text.format is None else self.text.format.chat()
        shared = {name: getattr(self, name) for name in SamplingFields.model_fields}
        return ChatCompletionRequest(
            **shared,
            model=self.model,
            messages=messages_of(self.input, self.instructions),
            max_completion_tokens=self.max_output_tokens,
            response_format=response_format,
            structured_outputs=self.structured_outputs,
            tools=None if self.tools is None else [tool.chat() for tool in self.tools],
            tool_choice=self._chat_choice(),
            parallel_tool_calls=self.parallel_tool_calls,
            logprobs=self.wants_logprobs or None,
            top_logprobs=self.top_logprobs if self.wants_logprobs else None,
        )

    def shown_tools(self) -> list[dict[str, Any]]:
        """Return the tools as a response repeats them."""
        return [tool.model_dump(exclude=UNSHOWN) for tool in self.tools or ()]

    def shown_choice(self) -> str | dict[str, Any]:
        """Return the `tool_choice` as a response repeats it."""
        choice = self.tool_choice or "auto"
        return choice if isinstance(choice, str) else choice.model_dump()

    def shown_text(self) -> dict[str, Any]:
        """Return `text` as a response repeats it."""
        text_format = None if self.text is None else self.text.format
        shown = {"type": "text"} if text_format is None else text_format.model_dump(by_alias=True, exclude_none=True)
        return {"format": shown}

    def _chat_choice(self) -> Any:
        if isinstance(self.tool_choice, FunctionChoice):
            return {"type": "function", "function": {"name": self.tool_choice.name}}
        return self.tool_choice


@contextlib.contextmanager
def fields_renamed() -> Iterator[None]:
    """Reword errors about a chat request as errors about the `ResponsesRequest` it was made from."""
    try:
        yield
    except InvalidRequestError as error:
        text = CHAT_NAME.sub(lambda match: CHAT_NAMES[match[0]], str(error))
        raise type(error)(text, CHAT_PARAMS.get(error.param or "", error.param)) from None
