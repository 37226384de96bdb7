"""One-line typed errors out of pydantic's, did-you-mean, and warnings that are said once."""

import difflib
import functools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ArgsKwargs, SchemaValidator

T = TypeVar("T")
MakeError = Callable[[str, str | None], Exception]
Foreign = Callable[[dict[str, Any]], dict[str, Any]]
LONGEST_VALUE = 80
LIMITS = {
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "finite_number": "must be finite",
    "string_too_short": "must have at least {min_length} character(s)",
    "string_too_long": "must have at most {max_length} characters",
    "model_type": "must be an object",
    "extra_forbidden": "is unknown",
    "string_pattern_mismatch": "must match {pattern}",
    "too_short": "must have at least {min_length} item(s)",
    "too_long": "must have at most {max_length} items",
    "literal_error": "must be one of {expected}",
    "string_unicode": "must be text without lone surrogates",
    "value_error": "{error}",
}

logger = logging.getLogger("slipstream")


@functools.lru_cache(maxsize=1024)
def warn_once(message: str) -> None:
    """Log *message* as a warning the first time it is said in this process."""
    logger.warning(message)


def shown(value: object) -> str:
    """Return *value* as it may stand in an error: one line, no more than a few words, no addresses."""
    if not isinstance(value, str | int | float | bool | list | tuple | dict | type(None)):
        return f"a {type(value).__name__}"
    if isinstance(value, int) and abs(value) >= 10**40:
        return "a number of more than 40 digits"
    text = repr(value) if not isinstance(value, list | tuple | dict) or len(value) <= 16 else f"{len(value)} items"
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `, did you mean 'x'?` for the nearest of *known*, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f", did you mean {near[0]!r}?" if near else ""


def one_line(error: ValidationError, known: Collection[str]) -> tuple[str, str | None]:
    """Return the message and the parameter of the first thing wrong."""
    first = error.errors(include_url=False)[0]
    where, kind = first["loc"], first["type"]
    name = str(where[0]) if where else None
    if kind in ("unexpected_keyword_argument", "unexpected_positional_argument"):
        hint = did_you_mean(name or "", known) or "; positional arguments are not taken" * ("positional" in kind)
        return f"unknown argument {name!r}{hint}", name
    said = _said(kind, first["msg"], first.get("ctx", {}))
    if name is None:  # checks across arguments begin with the name of the one at fault
        word = said.partition(" ")[0]
        return said, word if word in known else None
    path = name + "".join(f"[{part!r}]" for part in where[1:] if part != "[key]")
    # Sizes are told as sizes: the value itself may be megabytes.
    got = f"{len(first['input'])} items" if kind.startswith("too_") else shown(first["input"])
    return f"{path} {said}, got {got}", name


def _said(kind: str, message: str, numbers: Mapping[str, Any]) -> str:
    limit = LIMITS.get(kind)
    return message.replace("Input should be", "must be") if limit is None else limit.format(**numbers)


def typed(make: MakeError, foreign: Foreign = dict) -> Callable[[type[T]], type[T]]:
    """Decorate a pydantic dataclass so that its constructor raises what *make* makes of a message and a parameter.

    *foreign* is handed the keyword arguments first, and returns those that the class itself is to see.
    """

    def decorate(cls: type[T]) -> type[T]:
        validator: SchemaValidator = vars(cls)["__pydantic_validator__"]

        # Not through pydantic's own constructor: there a user's field could bear the name of one of its arguments.
        @functools.wraps(cls.__init__)
        def init(self: object, /, *args: Any, **kwargs: Any) -> None:
            try:
                validator.validate_python(ArgsKwargs(args, foreign(kwargs)), self_instance=self)
            except ValidationError as error:
                raise make(*one_line(error, getattr(cls, "__dataclass_fields__", ()))) from None

        cls.__init__ = init  # type: ignore[method-assign,assignment]
        return cls

    return decorate
