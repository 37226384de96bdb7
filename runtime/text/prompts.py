"""Tokenised prompts, prompts given as a dict, several prompts, and what vLLM's `LLM` takes beside them."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from protos.errors import InvalidRequestError
from protos.validation import shown

PROMPT_KEYS = frozenset({"prompt", "prompt_token_ids", "cache_salt"})


class Prompt(msgspec.Struct, frozen=True):
    """One prompt, tokenised and checked. `text` is None if token ids were given."""

    text: str | None
    token_ids: tuple[int, ...]
    cache_salt: str = ""


def check_prompt_dict(prompt: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of *prompt* that are not None.

    Raises:
        InvalidRequestError: a key is unknown, or there is neither text nor token ids.
    """
    given = {key: value for key, value in prompt.items() if value is not None}
    for key in given:
        if key not in PROMPT_KEYS:
            takes = ", ".join(sorted(PROMPT_KEYS))
            raise InvalidRequestError(f"prompt has an unknown key {shown(key)}; it may have {takes}", "prompt")
    if given.get("prompt_token_ids") is None and not isinstance(given.get("prompt"), str):
        raise InvalidRequestError('prompt must have "prompt" (text) or "prompt_token_ids"', "prompt")
    return given


def as_prompts(prompts: object) -> list[Any]:
    """Return *prompts*, which is text, token ids, a dict, or a list of these, as a list of single prompts.

    Raises:
        InvalidRequestError: it is empty, or none of these.
    """
    if isinstance(prompts, str | Mapping | Prompt):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        return [prompts] if prompts.ndim == 1 else list(prompts)
    if not isinstance(prompts, list | tuple):
        raise InvalidRequestError(f"prompt must be text, token ids, or a list of them, got {shown(prompts)}", "prompt")
    if not prompts:
        raise InvalidRequestError("prompt must not be empty, got an empty list", "prompt")
    return [prompts] if isinstance(prompts[0], int) else list(prompts)


def check_unused(lora_request: object, priority: Sequence[int] | None = None, num_prompts: int = 0) -> None:
    """Refuse an adapter, and a priority of one of *num_prompts* prompts other than 0, which all have.

    Raises:
        InvalidRequestError: names what is not supported.
    """
    if lora_request is not None:
        raise InvalidRequestError("lora_request is not supported", "lora_request")
    if priority is None:
        return
    if not isinstance(priority, list | tuple) or len(priority) != num_prompts:
        raise InvalidRequestError(
            f"priority must have {num_prompts} entries, as prompts, got {shown(priority)}", "priority"
        )
    if any(priority):
        raise InvalidRequestError(f"priority must be 0: prompts are served in order, got {shown(priority)}", "priority")


def adds_special_tokens(tokenization_kwargs: Mapping[str, Any] | None, *, default: bool) -> bool:
    """Return the one of vLLM's `tokenization_kwargs` that is taken here. Raises `InvalidRequestError` for others."""
    given = {key: value for key, value in (tokenization_kwargs or {}).items() if value is not None}
    adds = given.pop("add_special_tokens", default)
    if given:
        raise InvalidRequestError(
            f"tokenization_kwargs may have add_special_tokens, got {', '.join(map(repr, given))}; to truncate prompts, "
            "set truncate_prompt_tokens in SamplingParams",
            "tokenization_kwargs",
        )
    if not isinstance(adds, bool):
        raise InvalidRequestError(
            f"tokenization_kwargs: add_special_tokens must be true or false, got {shown(adds)}", "tokenization_kwargs"
        )
    return adds
