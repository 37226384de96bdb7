"""Translates the bodies of the Messages API to those of chat completions."""

import contextlib
from collections.abc import Iterator

from protos.errors import InvalidRequestError
from runtime.http.fields.structured import JsonSchemaFormat, ResponseFormat
from runtime.http.messages.conversation import chat_messages, is_prefilled
from runtime.http.messages.schemas import CountTokensRequest, MessagesRequest
from runtime.http.schemas import ChatCompletionRequest, SamplingFields

NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "structured_outputs": "output_config.format",
}
"""Fields of this API, by the names that errors of the chat path give them."""


@contextlib.contextmanager
def named_as_here() -> Iterator[None]:
    """Name the fields of this API in errors about what they were translated to."""
    try:
        yield
    except InvalidRequestError as error:
        if error.param not in NAMES:
            raise
        name = NAMES[error.param]
        raise type(error)(f"{name}{str(error).removeprefix(error.param)}", name) from None


def conversation(body: CountTokensRequest) -> ChatCompletionRequest:
    """Return the conversation and the tools of *body*. Raises `InvalidRequestError`."""
    turns, choice = chat_messages(body.messages, body.system), body.tool_choice
    return ChatCompletionRequest.model_construct(  # all of it was validated
        model=body.model,
        messages=turns,
        tools=None if body.tools is None else [tool.for_chat() for tool in body.tools],
        tool_choice=None if choice is None else choice.for_chat(),
        parallel_tool_calls=None if choice is None else not choice.disable_parallel_tool_use,
        continue_final_message=is_prefilled(turns) or None,
    )


def chat_request(body: MessagesRequest) -> ChatCompletionRequest:
    """Return *body* as a body of chat completions. Raises `InvalidRequestError`."""
    shared = {name: getattr(body, name) for name in SamplingFields.model_fields}
    translated = {
        "max_tokens": body.max_tokens,
        "stop": [*(body.stop_sequences or ()), *(body.stop or ())],
        "response_format": _response_format(body),
    }
    return conversation(body).model_copy(update=shared | translated)


def _response_format(body: MessagesRequest) -> ResponseFormat | None:
    schema = body.json_schema
    if schema is None:
        return None
    if body.tools and (body.tool_choice is None or body.tool_choice.type != "none"):
        raise InvalidRequestError(
            "output_config.format and tools do not go together: an answer in that form cannot be a call; leave one of "
            "them out, or set tool_choice to none",
            "output_config",
        )
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=schema))
