"""The `speculative_config` of one request: restricts the loaded speculation. It changes no token."""

from collections.abc import Sequence

import msgspec

from protos.errors import InvalidRequestError
from protos.messages import Request, WorkerInfo
from protos.validation import shown

PARAM = "speculative_config"


class SpeculationOverride(msgspec.Struct, frozen=True):
    """One request's `speculative_config`. None means the server's configuration."""

    enabled: bool = True
    num_speculative_tokens: int | None = None
    method: str | None = None


def apply_override(requests: Sequence[Request], override: SpeculationOverride, info: WorkerInfo) -> list[Request]:
    """Return *requests* with *override* applied.

    Raises:
        InvalidRequestError: it exceeds what is loaded; names both.
    """
    if not info.methods and (override.num_speculative_tokens is not None or override.method is not None):
        raise InvalidRequestError(
            "speculative_config requests speculation, but this server runs without speculation; leave it out", PARAM
        )
    _check_tokens(override.num_speculative_tokens, info.num_speculative_tokens)
    _check_method(override.method, info.methods)
    return [
        msgspec.structs.replace(
            each,
            speculate=override.enabled,
            num_speculative_tokens=override.num_speculative_tokens,
            method=override.method,
        )
        for each in requests
    ]


def _check_tokens(requested: int | None, loaded: int) -> None:
    if requested is None:
        return
    if requested < 1:
        raise InvalidRequestError(
            f"speculative_config: num_speculative_tokens must be at least 1, got {shown(requested)}; enabled: false "
            "turns speculation off",
            PARAM,
        )
    if requested > loaded:
        raise InvalidRequestError(
            f"speculative_config: num_speculative_tokens must be at most {loaded}, as the server is configured, got "
            f"{shown(requested)}",
            PARAM,
        )


def _check_method(requested: str | None, loaded: Sequence[str]) -> None:
    if requested is not None and requested not in loaded:
        raise InvalidRequestError(
            f"speculative_config: method must be one of those loaded ({', '.join(loaded)}), got {shown(requested)}",
            PARAM,
        )
