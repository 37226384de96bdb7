"""What one request may ask of speculation: less than the engine has loaded, never more. It changes no token."""

from collections.abc import Sequence

import msgspec

from protos.errors import InvalidRequestError
from protos.messages import Request, WorkerInfo
from protos.validation import shown

PARAM = "speculative_config"


class SpeculationOverride(msgspec.Struct, frozen=True):
    """One request's `speculative_config`. None: as the server is configured."""

    enabled: bool = True
    num_speculative_tokens: int | None = None
    method: str | None = None


def speculating(requests: Sequence[Request], wish: SpeculationOverride, info: WorkerInfo) -> list[Request]:
    """Return *requests* with what they wish of speculation.

    Raises:
        InvalidRequestError: more is wished than is loaded; names both.
    """
    if not info.methods and (wish.num_speculative_tokens is not None or wish.method is not None):
        raise InvalidRequestError(
            "speculative_config asks for guesses, but this server runs without speculation; leave it out", PARAM
        )
    _check_tokens(wish.num_speculative_tokens, info.num_speculative_tokens)
    _check_method(wish.method, info.methods)
    return [
        msgspec.structs.replace(
            each, speculate=wish.enabled, num_speculative_tokens=wish.num_speculative_tokens, method=wish.method
        )
        for each in requests
    ]


def _check_tokens(wished: int | None, loaded: int) -> None:
    if wished is None:
        return
    if wished < 1:
        raise InvalidRequestError(
            f"speculative_config: num_speculative_tokens must be at least 1, got {shown(wished)}; enabled: false turns "
            "speculation off",
            PARAM,
        )
    if wished > loaded:
        raise InvalidRequestError(
            f"speculative_config: num_speculative_tokens must be at most {loaded}, as the server is configured, got "
            f"{shown(wished)}",
            PARAM,
        )


def _check_method(wished: str | None, loaded: Sequence[str]) -> None:
    if wished is not None and wished not in loaded:
        raise InvalidRequestError(
            f"speculative_config: method must be one of those loaded ({', '.join(loaded)}), got {shown(wished)}", PARAM
        )
