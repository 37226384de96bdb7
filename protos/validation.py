"""Turns pydantic's errors into one-line typed errors; suggests names; logs warnings once."""

import difflib
import functools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar, get_args, get_type_hints

from pydantic import ValidationError
from pydantic_core import ArgsKwargs, SchemaValidator

T = TypeVar("T")
MakeError = Callable[[str, str | None], Exception]
Foreign = Callable[[dict[str, Any]], dict[str, Any]]
LONGEST_VALUE = 80
PLAIN = (str, int, float, bool, list, tuple, dict, type(None))
"""Types whose values are shown in errors. Others may show addresses, such as functions."""
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
    "tuple_type": "must be a valid list",
    "string_unicode": "must be text without lone surrogates",
    "value_error": "{error}",
}

logger = logging.getLogger("slipstream")


def why_unreadable(error: OSError | ValueError | RecursionError) -> str:
    """Return in words why a text file, or JSON in it, could not be read."""
    if isinstance(error, OSError):
        return (error.strerror or type(error).__name__).lower()
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)


@functools.lru_cache(maxsize=1024)
def warn_once(message: str) -> None:
    """Log *message* as a warning, once per process."""
    logger.warning(message)


def shown(value: object) -> str:
    """Return *value* for an error message: one short line, without addresses."""
    if not isinstance(value, PLAIN):
        return f"a {type(value).__name__}"
    if isinstance(value, int) and abs(value) >= 10**40:
        return "a number of more than 40 digits"
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    is_short = len(inner) <= 16 and all(isinstance(each, PLAIN) for each in inner)
    text = repr(value) if is_short else f"{len(inner)} item(s)"
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `, did you mean 'x'?` for the most similar of *known*, or an empty string."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f", did you mean {near[0]!r}?" if near else ""


def one_line(error: ValidationError, known: Collection[str]) -> tuple[str, str | None]:
    """Return the message and the parameter of the first error."""
    first = error.errors(include_url=False)[0]
    where, kind = first["loc"], first["type"]
    name = str(where[0]) if where else None
    if kind in ("unexpected_keyword_argument", "unexpected_positional_argument"):
        hint = did_you_mean(name or "", known) or "; positional arguments are not taken" * ("positional" in kind)
        return f"unknown argument {name!r}{hint}", name
    text = _message(kind, first["msg"], first.get("ctx", {}))
    if name is None:  # messages of checks across arguments begin with an argument's name
        word = text.partition(" ")[0]
        return text, word if word in known else None
    path = name + "".join(f"[{part!r}]" for part in where[1:] if part != "[key]")
    if kind == "missing":
        return f"{path} is required", name
    # Report the size of long values, which may be megabytes.
    got = f"{len(first['input'])} items" if kind.startswith("too_") else shown(first["input"])
    return f"{path} {text}, got {got}", name


def _message(kind: str, message: str, numbers: Mapping[str, Any]) -> str:
    limit = LIMITS.get(kind)
    return message.replace("Input should be", "must be") if limit is None else limit.format(**numbers)


def _types(hint: object) -> frozenset[object]:
    """Return the types in *hint*, with those within unions, lists and dictionaries."""
    inner = get_args(hint)
    return frozenset().union(*map(_types, inner)) if inner else frozenset({hint})


def _numbers(kinds: Mapping[str, frozenset[object]]) -> dict[str, str]:
    """Return the fields that hold numbers, alone or in lists, and no booleans, with the kind of number."""
    return {
        name: "number" if float in types else "integer"
        for name, types in kinds.items()
        if not {int, float}.isdisjoint(types) and bool not in types
    }


def _wrong(path: str, value: object, wrong: tuple[type, ...], depth: int = 3) -> Iterator[tuple[str, object]]:
    """Yield what is of types *wrong* in *value*, which may be long, with its place; none deeper than *depth* lists.

    Keys may be text, as in JSON.
    """
    if isinstance(value, wrong):
        yield path, value
    elif not depth or isinstance(value, int | float | str | None):
        return
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _wrong(f"{path}[{key!r}]", key, (bool,), depth - 1)
            yield from _wrong(f"{path}[{key!r}]", each, wrong, depth - 1)
    elif isinstance(value, list | tuple | set | frozenset):
        if not ({int, float, str} - {*wrong}).issuperset(map(type, value)):
            for index, each in enumerate(value):
                yield from _wrong(f"{path}[{index}]", each, wrong, depth - 1)
    else:
        from numpy import generic, ndarray  # noqa: PLC0415 - commands that need none of it start faster

        if isinstance(value, ndarray | generic):
            yield from _wrong(path, value.tolist(), wrong, depth)


def typed(
    make: MakeError, foreign: Foreign = dict, not_numbers: tuple[type, ...] = (bool,)
) -> Callable[[type[T]], type[T]]:
    """Decorate a pydantic dataclass so that its constructor raises `make(message, parameter)`.

    *foreign* maps the keyword arguments to those passed to the class. Types *not_numbers* are refused for numbers:
    pydantic takes booleans as 1 and 0, and reads numbers in text.
    """

    def decorate(cls: type[T]) -> type[T]:
        validator: SchemaValidator = vars(cls)["__pydantic_validator__"]
        kinds = {name: _types(hint) for name, hint in get_type_hints(cls).items()}
        numbers, names = _numbers(kinds), tuple(getattr(cls, "__dataclass_fields__", ()))

        # Not pydantic's own constructor: a field may have the name of one of its arguments.
        @functools.wraps(cls.__init__)
        def init(self: object, /, *args: Any, **kwargs: Any) -> None:
            given = foreign(kwargs)
            for name, value in (*zip(names, args, strict=False), *given.items()):
                may_be_wrong = name in numbers and not (isinstance(value, str) and str in kinds[name])
                for path, wrong in _wrong(name, value, not_numbers) if may_be_wrong else ():
                    raise make(f"{path} must be a valid {numbers[name]}, got {shown(wrong)}", name)
            try:
                validator.validate_python(ArgsKwargs(args, given), self_instance=self)
            except ValidationError as error:
                raise make(*one_line(error, names)) from None

        cls.__init__ = init  # type: ignore[method-assign,assignment]
        return cls

    return decorate
