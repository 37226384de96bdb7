"""Chat messages -> the text that a model's chat template makes of them."""

from collections.abc import Mapping
from typing import Any

from protos.errors import InvalidRequestError
from protos.validation import shown
from runtime.tokenizer import Tokenizer


def render_chat(
    tokenizer: Tokenizer,
    messages: object,
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    **options: Any,
) -> str:
    """Return the text of *messages* by the tokenizer's chat template, or by *chat_template*.

    Raises:
        InvalidRequestError: there is no template, the messages are not messages, or the template refuses them.
    """
    if chat_template is None and tokenizer.chat_template is None:
        raise InvalidRequestError(
            "this model has no chat template; start the server with --chat-template, or use completions", "messages"
        )
    try:
        rendered = tokenizer.apply_chat_template(
            _messages(messages),
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            tokenize=False,
            **options,
        )
    except InvalidRequestError:
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise InvalidRequestError(f"the chat template refuses these messages: {reason}", "messages") from None
    return str(rendered)


def _messages(messages: object) -> list[dict[str, Any]]:
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequestError(f"messages must be a list with at least one, got {shown(messages)}", "messages")
    return [_message(message) for message in messages]


def _message(message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"each message must have a role and content, got {shown(message)}", "messages")
    return {**message, "content": _content(message.get("content"))}


def _content(content: object) -> str | None:
    """Text parts are joined; there is nothing but text."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise InvalidRequestError(f"message content must be text or a list of parts, got {shown(content)}", "messages")
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise InvalidRequestError(f"message parts must be of type 'text', got {shown(kind)}", "messages")
    return "\n".join(part["text"] for part in content)
