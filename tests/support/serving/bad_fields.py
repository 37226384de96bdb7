"""Rows of request fields that a server must refuse: path, body, words of the message."""

from typing import Any

CONTEXT = 512
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES_API, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
TOO_MUCH: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"n": 10**6}, "at most 128"),
    (COMPLETIONS, {"n": 10**60}, "128"),
    (COMPLETIONS, {"best_of": 10**6}, "use n"),
    (COMPLETIONS, {"logprobs": 10**6}, "at most 20"),
    (COMPLETIONS, {"prompt_logprobs": 10**6}, "at most 20"),
    (CHAT, {"logprobs": True, "top_logprobs": 16_384}, "at most 20"),
    (COMPLETIONS, {"stop": ["a"] * 10_000}, "at most 64"),
    (COMPLETIONS, {"stop": "a" * 10_000}, "at most 1024"),
    (COMPLETIONS, {"stop_token_ids": [5] * 10_000}, "at most 1024"),
    (COMPLETIONS, {"bad_words": ["a"] * 10_000}, "at most 256"),
    (COMPLETIONS, {"logit_bias": {str(i): 1 for i in range(10_000)}}, "at most 1024"),
    (COMPLETIONS, {"prompt": ["x"] * 10_000}, "at most 1024"),
    (COMPLETIONS, {"prompt": ["x"] * 1000, "n": 128}, "at most 1024 answers"),
    (COMPLETIONS, {"max_tokens": 2**31 - 1}, f"context of {CONTEXT}"),
    (COMPLETIONS, {"max_tokens": 10**30}, "at most"),
    (CHAT, {"max_completion_tokens": 10**9}, f"context of {CONTEXT}"),
    (RESPONSES, {"max_output_tokens": 10**9}, f"context of {CONTEXT}"),
    (RESPONSES, {"top_logprobs": 16_384}, "at most 20"),
    (RESPONSES, {"input": "x " * 2000}, f"{CONTEXT}"),
    (RESPONSES, {"tools": [{"type": "function", "name": "f"}] * 200}, "at most 128"),
    (MESSAGES_API, {"max_tokens": 10**30}, "at most"),
    (MESSAGES_API, {"messages": [{"role": "user", "content": "x " * 2000}]}, f"{CONTEXT}"),
    (MESSAGES_API, {"stop_sequences": ["a"] * 10_000}, "stop_sequences must have at most 64"),
    (MESSAGES_API, {"stop_sequences": ["a" * 10_000]}, "stop_sequences"),
    (MESSAGES_API, {"tools": [{"name": "f", "input_schema": {"type": "object"}}] * 200}, "at most 128"),
    (MESSAGES_API, {"tools": [{"name": "f" * 200, "input_schema": {"type": "object"}}]}, "must match"),
    (COMPLETIONS, {"prompt": "x " * 2000}, f"{CONTEXT}"),
    (COMPLETIONS, {"prompt": [5] * 5000}, "prompt has 5000 tokens"),
    (CHAT, {"messages": [{"role": "user", "content": "x " * 2000}]}, f"{CONTEXT}"),
    (COMPLETIONS, {"timeout": 1e9}, "at most 86400"),
]
NOTHING: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": ""}, "must not be empty"),
    (COMPLETIONS, {"prompt": []}, "must not be empty"),
    (COMPLETIONS, {"prompt": [[]]}, "must not be empty"),
    (COMPLETIONS, {"prompt": ["x", ""]}, "must not be empty"),
    (COMPLETIONS, {"prompt": None}, "prompt"),
    (CHAT, {"messages": []}, "at least one"),
    (CHAT, {"messages": [{}]}, "role"),
    (RESPONSES, {"input": None}, "input"),
    (MESSAGES_API, {"max_tokens": 0}, "at least 1"),
    (MESSAGES_API, {"messages": None}, "messages"),
    (MESSAGES_API, {"messages": []}, "at least 1"),
    (MESSAGES_API, {"messages": [{}]}, "role"),
    (MESSAGES_API, {"messages": [{"role": "user", "content": None}]}, "text or a list of blocks"),
    (MESSAGES_API, {"messages": [{"role": "user", "content": [None]}]}, "an object with a type"),
    (COUNT_TOKENS, {"messages": [{"role": "user", "content": []}]}, "must have content"),
    (RESPONSES, {"input": []}, "at least one"),
    (RESPONSES, {"input": [None]}, "input"),
    (RESPONSES, {"input": [{"role": "user"}]}, "got None"),
    (RESPONSES, {"input": [{"role": "user", "content": []}]}, "must have content"),
    (COMPLETIONS, {"timeout": 0}, "greater than 0"),
]
NO_SUCH_TOKEN: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": [-1]}, "-1"),
    (COMPLETIONS, {"prompt": [300]}, "0 to 299"),
    (COMPLETIONS, {"prompt": [2**63]}, "0 to 299"),
    (COMPLETIONS, {"prompt": [5, 2**70]}, "0 to 299"),
    (COMPLETIONS, {"stop_token_ids": [300]}, "300"),
    (COMPLETIONS, {"stop_token_ids": [-1]}, "-1"),
    (COMPLETIONS, {"logit_bias": {"300": 1}}, "300"),
    (COMPLETIONS, {"logit_bias": {"-1": 1}}, "at least 0"),
    (COMPLETIONS, {"allowed_token_ids": [300]}, "300"),
    (COMPLETIONS, {"allowed_token_ids": [-5]}, "at least 0"),
    (COMPLETIONS, {"allowed_token_ids": []}, "at least 1"),
    ("/detokenize", {"tokens": [300]}, "0 to 299"),
    ("/detokenize", {"tokens": [-1]}, "-1"),
]
FOREIGN: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"chat_template": "{{ 7 * 7 }}"}, "--chat-template"),
    (CHAT, {"chat_template_kwargs": {"a": {"b": "{{ 1 }}"}}}, "chat_template_kwargs"),
    (
        CHAT,
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/secret"}}]}
            ]
        },
        "'text'",
    ),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "x"}}]}]}, "'text'"),
    (CHAT, {"messages": [{"role": "user", "content": {"type": "text"}}]}, "text or a list"),
    (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://127.0.0.1:1/x"}]}]},
        "'input_image'",
    ),
    (MESSAGES_API, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
    (MESSAGES_API, {"messages": [{"role": "x" * 10_000, "content": "x"}]}, "role must be one of"),
    (MESSAGES_API, {"messages": [{"role": "user", "content": [{"type": "x" * 10_000}]}]}, "not supported"),
    (MESSAGES_API, {"system": [{"type": "document", "source": {"data": "x" * 10_000}}]}, "'document'"),
    (MESSAGES_API, {"tools": [{"type": "x" * 10_000}]}, "not supported"),
    (MESSAGES_API, {"mcp_servers": [{"url": "http://127.0.0.1:1/x"}]}, "mcp_servers"),
    (MESSAGES_API, {"container": {"skills": ["x" * 10_000]}}, "container"),
    (MESSAGES_API, {"context_management": {"edits": [{"type": None}]}}, "context_management"),
    (MESSAGES_API, {"chat_template": "{{ 7 * 7 }}"}, "chat_template"),
    (COUNT_TOKENS, {"max_tokens": 5}, "unknown field"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "x" * 10_000}]}, "item_reference"),
    (RESPONSES, {"input": [{"type": "x" * 10_000}]}, "not supported"),
    (RESPONSES, {"tools": [{"type": "mcp", "server_url": "http://127.0.0.1:1/x"}]}, "'mcp'"),
    (RESPONSES, {"previous_response_id": "x" * 10_000}, "previous_response_id"),
    (RESPONSES, {"background": {"a": [1]}}, "background"),
    (RESPONSES, {"chat_template": "{{ 7 * 7 }}"}, "--chat-template"),
    (COMPLETIONS, {"prompt_embeds": "gANjdG9yY2g="}, "prompt_embeds is not supported"),
    (COMPLETIONS, {"weights": "gANjdG9yY2g="}, "unknown field"),
    (COMPLETIONS, {"x" * 10_000: 1}, "unknown field"),
    (COMPLETIONS, {"extra_args": {"a": 1}}, "extra_args"),
]
GRAMMARS: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"structured_outputs": {"regex": "(" * 30_000 + ")" * 30_000}}, "structured_outputs"),
    (COMPLETIONS, {"structured_outputs": {"regex": "(a+)+" * 5000}}, "structured_outputs"),
    (COMPLETIONS, {"structured_outputs": {"regex": "["}}, "structured_outputs"),
    (COMPLETIONS, {"structured_outputs": {"grammar": "start: start"}}, "structured_outputs"),
    (COMPLETIONS, {"structured_outputs": {"choice": []}}, "structured_outputs"),
    (COMPLETIONS, {"structured_outputs": {"self": 1}}, "unknown argument 'self'"),
    (COMPLETIONS, {"structured_outputs": {"__dataclass_self__": 1}}, "unknown argument '__dataclass_self__'"),
    (COMPLETIONS, {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "what"}}}},
     "response_format: "),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {
        "$ref": "http://127.0.0.1:1/schema.json"}}}}, "response_format: "),
    (COMPLETIONS, {"guided_regex": "["}, "guided_regex: "),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "what"}}}},
     "text.format: "),
    (RESPONSES, {"structured_outputs": {"regex": "["}}, "structured_outputs"),
    (MESSAGES_API, {"output_config": {"format": {"type": "json_schema", "schema": {"type": "what"}}}}, "output_config"),
    (MESSAGES_API, {"tools": [{"name": "f", "input_schema": {"type": "object", "$ref": "http://127.0.0.1:1/x"}}],
                "tool_choice": {"type": "any"}}, "tools"),
]  # fmt: skip
ROWS = (
    [("too much", row) for row in TOO_MUCH]
    + [("nothing", row) for row in NOTHING]
    + [("no such token", row) for row in NO_SUCH_TOKEN]
    + [("foreign", row) for row in FOREIGN]
    + [("grammar", row) for row in GRAMMARS]
)
