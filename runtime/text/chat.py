"""Chat messages -> the text that a model's chat template makes of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from protos.errors import InvalidRequestError
from protos.validation import shown
from runtime.text.tokenizer import Tokenizer

Tools = Sequence[Mapping[str, Any]]
Hide = Callable[[Any], Any]


def render_chat(
    tokenizer: Tokenizer,
    messages: object,
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Tools | None = None,
    hide: Hide = lambda told: told,
    **options: Any,
) -> str:
    """Return the text of *messages* by the tokenizer's chat template, or by *chat_template*.

    *hide* is applied to what the template gets of the messages and *tools*, once they are read.

    Raises:
        InvalidRequestError: there is no template, it takes no *tools*, the messages are not messages, or the template
            refuses them.
    """
    template = _spelt(tokenizer.chat_template if chat_template is None else chat_template)
    if not template:
        raise InvalidRequestError(
            "this model has no chat template; start the server with --chat-template, or use completions", "messages"
        )
    if tools and "tools" not in template:
        raise InvalidRequestError(
            "this model's chat template takes no tools; start the server with --chat-template, or set tool_choice to "
            "none",
            "tools",
        )
    known = _messages(messages, knows_developer="developer" in template)
    try:
        rendered = tokenizer.apply_chat_template(
            hide(known),
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            tools=hide(list(tools)) if tools else None,
            tokenize=False,
            **options,
        )
    except RecursionError:
        raise InvalidRequestError("the messages or tools are nested too deeply to be written out", "messages") from None
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise InvalidRequestError(f"the chat template refuses these messages: {reason}", "messages") from None
    return str(rendered)


def _spelt(template: object) -> str:
    """Return the text of a template, or of all of them where a model has several by name."""
    if isinstance(template, Mapping):
        return "\n".join(map(str, template.values()))
    return str(template or "")


def _messages(messages: object, *, knows_developer: bool) -> list[dict[str, Any]]:
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequestError(f"messages must be a list with at least one, got {shown(messages)}", "messages")
    known = [_message(message) for message in messages]
    if knows_developer:
        return known
    # What OpenAI calls the developer, most templates know as the system.
    return [message | {"role": "system"} if message["role"] == "developer" else message for message in known]


def _message(message: object) -> dict[str, Any]:
    """Return a message as templates expect it: without what is null, with text as content."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"each message must have a role and content, got {shown(message)}", "messages")
    given = {key: value for key, value in message.items() if value not in (None, [])}
    if "content" not in given and given["role"] != "assistant":
        raise InvalidRequestError(f"a message of role {shown(given['role'])} must have content", "messages")
    given["content"] = _content(given.get("content", ""))
    if "tool_calls" in given:
        given["tool_calls"] = _calls(given["tool_calls"])
    return given


def _content(content: object) -> str:
    """Text parts are joined; there is nothing but text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise InvalidRequestError(f"message content must be text or a list of parts, got {shown(content)}", "messages")
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise InvalidRequestError(f"message parts must be of type 'text', got {shown(kind)}", "messages")
    return "\n".join(part["text"] for part in content)


def _calls(calls: object) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise InvalidRequestError(f"tool_calls of a message must be a list, got {shown(calls)}", "messages")
    return [_call(call) for call in calls]


def _call(call: object) -> dict[str, Any]:
    """Return a call as templates expect it, with its arguments as an object and not as text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"a tool call must have a function with a name, got {shown(call)}", "messages")
    arguments = function.get("arguments") or "{}"
    try:
        read = msgspec.json.decode(arguments) if isinstance(arguments, str) else arguments
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        read = None
    if not isinstance(read, Mapping):
        raise InvalidRequestError(
            f"the arguments of a tool call must be the text of a JSON object, got {shown(arguments)}", "messages"
        )
    return {**call, "function": {**function, "arguments": dict(read)}}
