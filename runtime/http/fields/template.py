"""Options of the chat template in request bodies."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator

from protos.validation import shown

LONGEST_VALUE = 64
LARGEST_VALUE = 1 << 20
MOST_VALUES = 16
RESERVED = frozenset({
    "messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "sanitize_control_tokens", "tokenizer_kwargs", "self", "params", "tokenizer",
    "escape",
})  # fmt: skip
"""Parameters of `apply_chat_template` and of what calls it: these have a meaning of their own."""
NAMES = ("add_generation_prompt", "continue_final_message", "reasoning_effort")


def _checked_options(value: object) -> object:
    """Accept what switches a template: small values, which cannot make rendering slow."""
    if value is None:
        return value
    if not isinstance(value, Mapping) or len(value) > MOST_VALUES:
        raise ValueError(f"must be an object of at most {MOST_VALUES} names")
    for name, given in value.items():
        if name in RESERVED:
            raise ValueError(f"must not have {name}, which is a field of the request or is not taken from requests")
        is_small = len(given) <= LONGEST_VALUE if isinstance(given, str) else _is_small_number(given)
        if not is_small:
            raise ValueError(
                f"must have true, false, numbers up to {LARGEST_VALUE} or texts of up to {LONGEST_VALUE} characters as "
                f"values, got {shown(given)} for {name}"
            )
    return value


def _is_small_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and abs(value) <= LARGEST_VALUE)


class TemplateFields(BaseModel):
    """Options of the chat template. The template itself never comes from a request."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, BeforeValidator(_checked_options)] = None

    @property
    def template_options(self) -> dict[str, Any]:
        """The options that are given. A template ignores those that it does not know."""
        given = {name: getattr(self, name) for name in NAMES}
        return {name: value for name, value in given.items() if value is not None} | (self.chat_template_kwargs or {})
