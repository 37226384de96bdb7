"""`truncation: auto`: the oldest messages are left out where a conversation does not fit the context."""

from collections.abc import Mapping
from typing import Any

from protos.errors import InvalidRequestError
from protos.sampling import SamplingParams
from runtime.http.context import RouteContext
from runtime.http.schemas import ChatCompletionRequest


async def truncated(context: RouteContext, body: ChatCompletionRequest) -> ChatCompletionRequest:
    """Return *body* with as many of its newest texts as fit, from one of a user on.

    The system messages at the beginning are kept. If not even the user's last text fits, it is kept all the same.
    """
    messages = body.messages
    num_kept = next((i for i, each in enumerate(messages) if each["role"] not in ("system", "developer")), 0)
    users = [i for i in range(num_kept, len(messages)) if messages[i]["role"] == "user"]
    starts = [(i, part) for i in users for part in range(_num_parts(messages[i]))]
    candidates = [body, *(_from(body, num_kept, *start) for start in starts if start > (num_kept, 0))]
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        if await _fits(context, candidates[middle]):
            high = middle
        else:
            low = middle + 1
    return candidates[low]


def _num_parts(message: Mapping[str, Any]) -> int:
    """Return how many texts a message has: those of successive items of one role."""
    content = message.get("content")
    return len(content) if isinstance(content, list) else 1


def _from(body: ChatCompletionRequest, num_kept: int, start: int, part: int) -> ChatCompletionRequest:
    """Return *body* from a part of the message at *start* on, after the first *num_kept* messages."""
    first = body.messages[start]
    if part:
        first = {**first, "content": first["content"][part:]}
    return body.model_copy(update={"messages": [*body.messages[:num_kept], first, *body.messages[start + 1 :]]})


async def _fits(context: RouteContext, body: ChatCompletionRequest) -> bool:
    """Whether the conversation and its answer fit the context. Raises `InvalidRequestError`."""
    use = body.tool_use(context.options.tools)
    try:
        prompt = await context.engine.render_chat(body.messages, SamplingParams(), **use.template_options)
    except InvalidRequestError as error:
        if error.param != "prompt":
            raise
        return False  # the text is too long to be tokenised
    return len(prompt.token_ids) + (body.max_completion_tokens or 1) <= context.engine.info.max_model_len
