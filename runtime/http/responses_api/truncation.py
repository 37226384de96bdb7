"""`truncation: auto`: the oldest messages are left out where a conversation does not fit the context."""

from protos.errors import InvalidRequestError
from protos.sampling import SamplingParams
from runtime.http.context import RouteContext
from runtime.http.schemas import ChatCompletionRequest


async def truncated(context: RouteContext, body: ChatCompletionRequest) -> ChatCompletionRequest:
    """Return *body* with as many of its newest messages as fit, from a user's message on.

    The system messages at the beginning are kept. If not even the last user's message fits, it is kept all the same.
    """
    messages = body.messages
    num_kept = next((i for i, each in enumerate(messages) if each["role"] not in ("system", "developer")), 0)
    starts = [i for i in range(num_kept, len(messages)) if messages[i]["role"] == "user"]
    candidates = [body, *(_from(body, num_kept, start) for start in starts if start > num_kept)]
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        if await _fits(context, candidates[middle]):
            high = middle
        else:
            low = middle + 1
    return candidates[low]


def _from(body: ChatCompletionRequest, num_kept: int, start: int) -> ChatCompletionRequest:
    return body.model_copy(update={"messages": body.messages[:num_kept] + body.messages[start:]})


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
