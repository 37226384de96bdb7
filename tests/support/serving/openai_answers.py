"""Answers validated strictly against the OpenAI client's own types.

No field may be missing, and no field may be unknown except those we document.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import openai
import pydantic
from openai.types import Completion

T = TypeVar("T", bound=pydantic.BaseModel)
Check = Callable[[openai.OpenAI, str], None]
PROMPT = "def add(a, b):\n    return"
USER: Any = [{"role": "user", "content": "say something"}]
DOCUMENTED = {
    "ChatCompletion": {"metrics"},
    "ChatCompletionChunk": {"metrics"},
    "Completion": {"metrics"},
    "CompletionChoice": {"stop_reason", "prompt_logprobs"},
    "Choice": {"stop_reason", "prompt_logprobs"},
    "Model": {"max_model_len"},
    "Response": {"metrics"},
}
"""Fields that we add to the client's types, by type."""


def strict(answer: T, **patches: Any) -> T:
    """Validate *answer* and return it; *patches* replace fields of its choices that the client's type has wrong."""
    raw = json.loads(answer.model_dump_json(exclude_unset=True, by_alias=True, warnings=False))
    for choice in raw.get("choices", ()):
        choice.update(patches)
        _forget_parsed(choice.get("message", {}))
    kind = next(base for base in type(answer).__mro__ if "[" not in base.__name__ and "Parsed" not in base.__name__)
    checked = kind.model_validate_json(json.dumps(raw), strict=True)
    for name, found in extras(checked):
        assert found <= DOCUMENTED.get(name, set()), (name, found)
    return answer


def _forget_parsed(message: dict[str, Any]) -> None:
    """Remove fields that the client itself added."""
    message.pop("parsed", None)
    for call in message.get("tool_calls") or ():
        call.pop("index", None)
        call["function"].pop("parsed_arguments", None)


def extras(value: object) -> Iterator[tuple[str, set[str]]]:
    """Yield the name of each model in *value*, with the fields that its type does not have."""
    if isinstance(value, list):
        for item in value:
            yield from extras(item)
    elif isinstance(value, pydantic.BaseModel):
        yield type(value).__name__, set(value.model_extra or {})
        for name in type(value).model_fields:
            yield from extras(getattr(value, name))


def strict_chunk(chunk: Completion) -> Completion:
    """Validate a chunk of a completion; the client's type requires a finish reason even before the last chunk."""
    ended = all(choice.finish_reason is not None for choice in chunk.choices)
    return strict(chunk) if ended else strict(chunk, finish_reason="stop")
