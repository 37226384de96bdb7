"""Fields of other servers that are not supported: ignored if they change no token, else refused."""

from collections.abc import Collection, Mapping
from typing import Any

from protos.errors import InvalidRequestError
from protos.validation import shown

# Fields of the OpenAI SDK and vLLM that have no effect here.
IGNORED = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "moderation", "reasoning_effort", "verbosity", "early_stopping", "length_penalty",
    "request_id", "include_reasoning", "guided_decoding_backend",
})  # fmt: skip

Neutral = Mapping[str, tuple[object, ...]]

# Refused unless they have one of these values, which change nothing: fields of both, and some of vLLM alone.
NEUTRAL: Neutral = {
    "suffix": (None, ""),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "web_search_options": (None,),
    "use_beam_search": (None, False),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "chat_template": (None,),
    "priority": (None, 0),
    "return_tokens_as_token_ids": (None, False),
    "documents": (None, []),
    "prompt_embeds": (None,),
    "logits_processors": (None, []),
    "repetition_detection": (None,),
    "thinking_token_budget": (None,),
    "mm_processor_kwargs": (None, {}),
    "kv_transfer_params": (None, {}),
    "vllm_xargs": (None, {}),
}
NO_TOOLS: Neutral = {
    "chat_template_kwargs": (None, {}),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
}
"""The same for requests that are not conversations."""

NOT_STORED = "responses are not stored; send the whole conversation as input"
INSTEAD = {
    "store": "responses are not stored; leave it out or set it to false",
    "previous_response_id": NOT_STORED,
    "conversation": NOT_STORED,
    "prompt": "prompts are not stored; send instructions and input",
    "background": "responses are not stored; use stream",
    "mcp_servers": "connect to them in the client, and send their tools as tools",
    "container": "tools run in the client",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "tools": "use chat completions",
    "tool_choice": "use chat completions",
    "chat_template": "templates are not taken from requests; start the server with --chat-template",
    "chat_template_kwargs": "use chat completions",
}


def screen(body: Mapping[str, Any], neutral: Neutral, fields: Collection[str]) -> dict[str, Any]:
    """Return *body* without what has no effect on a request that has these *fields*.

    Raises:
        InvalidRequestError: an unsupported field would change the answer; names it and its value.
    """
    for name, values in neutral.items():
        if name in body and body[name] not in values:
            instead = f": {INSTEAD[name]}" if name in INSTEAD else ""
            raise InvalidRequestError(f"{name} is not supported, got {shown(body[name])}{instead}", name)
    ignored = IGNORED.difference(fields).union(neutral)
    return {name: value for name, value in body.items() if name not in ignored}
