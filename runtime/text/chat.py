"""Renders chat messages by the model's chat template."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from pydantic_core import from_json

from protos.errors import InvalidRequestError
from protos.validation import shown
from runtime.text.tokenizer import Tokenizer

Tools = Sequence[Mapping[str, Any]]
Escape = Callable[[Any], Any]
CUT_OFF = "Input data was truncated"
"""What msgspec says of JSON that ends too early."""
TEXT_OF_PART = {"text": "text", "refusal": "refusal"}
"""The field with the text of a content part, by its type."""


def render_chat(
    tokenizer: Tokenizer,
    messages: object,
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Tools | None = None,
    escape: Escape = lambda value: value,
    **options: Any,
) -> str:
    """Return the text of *messages*, rendered by *chat_template* or else by the tokenizer's own.

    A final message without text, to be continued, is the same as none: the answer begins.

    *escape* is applied to the checked messages, the *tools* and the other *options* before they are rendered.

    Raises:
        InvalidRequestError: there is no template, it does not support *tools*, the messages are malformed, or the
            template raises an error.
    """
    template = _template_text(tokenizer.chat_template if chat_template is None else chat_template)
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
    checked = _messages(messages, has_developer="developer" in template)
    if continue_final_message and len(checked) > 1 and _is_empty_answer(checked[-1]):
        # Transformers would cut the white space between the role's header and the text, too.
        checked.pop()
        add_generation_prompt, continue_final_message = True, False
    try:
        rendered = tokenizer.apply_chat_template(
            escape(checked),
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            tools=escape(list(tools)) if tools else None,
            tokenize=False,
            **escape(options),
        )
    except RecursionError:
        raise InvalidRequestError("the messages or tools are nested too deeply to be rendered", "messages") from None
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise InvalidRequestError(f"the chat template refuses these messages: {reason}", "messages") from None
    return str(rendered)


def _template_text(template: object) -> str:
    """Return the text of a template, or of all templates if the model has several."""
    if isinstance(template, Mapping):
        return "\n".join(map(str, template.values()))
    return str(template or "")


def _messages(messages: object, *, has_developer: bool) -> list[dict[str, Any]]:
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequestError(f"messages must be a list with at least one, got {shown(messages)}", "messages")
    checked = [_message(message) for message in messages]
    if has_developer:
        return checked
    # Most templates have no role "developer", which is OpenAI's name for "system".
    return [message | {"role": "system"} if message["role"] == "developer" else message for message in checked]


def _message(message: object) -> dict[str, Any]:
    """Return a message as templates expect it: without null fields, with text as content."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"each message must have a role and content, got {shown(message)}", "messages")
    given = {key: value for key, value in message.items() if value not in (None, [])}
    may_be_empty = given["role"] == "assistant" or (given["role"] == "tool" and message.get("content") == [])
    if "content" not in given and not may_be_empty:
        raise InvalidRequestError(f"a message of role {shown(given['role'])} must have content", "messages")
    given["content"] = _content(given.get("content", ""))
    if "tool_calls" in given:
        given["tool_calls"] = _calls(given["tool_calls"])
    return given


def _is_empty_answer(message: Mapping[str, Any]) -> bool:
    return message["role"] == "assistant" and message.keys() == {"role", "content"} and not message["content"].strip()


def _content(content: object) -> str:
    """Join the parts of *content*, which must all be text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise InvalidRequestError(f"message content must be text or a list of parts, got {shown(content)}", "messages")
    return "\n".join(map(_part, content))


def _part(part: object) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else part
    field = TEXT_OF_PART.get(kind) if isinstance(kind, str) else None
    text = part.get(field) if field and isinstance(part, Mapping) else None
    if not isinstance(text, str):
        raise InvalidRequestError(f"message parts must be of type 'text', got {shown(kind)}", "messages")
    return text


def _calls(calls: object) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise InvalidRequestError(f"tool_calls of a message must be a list, got {shown(calls)}", "messages")
    return [_call(call) for call in calls]


def _call(call: object) -> dict[str, Any]:
    """Return a call as templates expect it: its arguments are an object, not text. They may have been cut off."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"a tool call must have a function with a name, got {shown(call)}", "messages")
    arguments = function.get("arguments") or "{}"
    parsed = _arguments(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(parsed, Mapping):
        raise InvalidRequestError(
            f"the arguments of a tool call must be the text of a JSON object, got {shown(arguments)}", "messages"
        )
    return {**call, "function": {**function, "arguments": dict(parsed)}}


def _arguments(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        return begun_object(text, with_text=True) if str(error) == CUT_OFF else None
    except (UnicodeError, RecursionError):
        return None


def begun_object(text: str, *, with_text: bool = False) -> dict[str, Any] | None:
    """Return what is there of a JSON object that was cut off; None if it is no object.

    *with_text*: also what is there of a text that was cut off. A caller should not run a command that is not whole.
    """
    try:
        found = from_json(text, allow_partial="trailing-strings" if with_text else True, allow_inf_nan=False)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
