"""Detects code that shadows Slipstream's top-level packages.

`runtime`, `workers` and `demo` are common names. A folder of that name in the working directory, or another installed
package, would be imported instead of ours and fail far from the cause.
"""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

NAMES = ("slipstream", "protos", "proposers", "workers", "runtime", "cluster", "demo")
_HOME = Path(__file__).resolve().parent.parent


def check() -> None:
    """Check that each of our top-level names is imported from our own files.

    Raises:
        ConfigError: names each foreign module and its path.
    """
    foreign = [f"`{name}` is {place}" for name in NAMES if (place := _foreign_origin(name)) is not None]
    if foreign:
        raise _error_type()(
            f"Slipstream lives in {_HOME}, but Python would import other code under its names: {'; '.join(foreign)}. "
            "Start from another directory, or remove that path from PYTHONPATH or that package from the environment."
        )


def _foreign_origin(name: str) -> str | None:
    """Return the path of *name* if it is not ours, else None. Imports nothing."""
    spec = _spec(name)
    if spec is None:
        return None
    places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    ours = {_HOME / name / "__init__.py", _HOME / f"{name}.py"}
    return next((place for place in places if Path(place).resolve() not in ours), None)


def _spec(name: str) -> ModuleSpec | None:
    loaded = sys.modules.get(name)
    return loaded.__spec__ if loaded is not None and loaded.__spec__ is not None else _search(name)


def _search(name: str) -> ModuleSpec | None:
    try:
        return find_spec(name)
    except ValueError:  # a script run by path has no spec
        return None


def _error_type() -> type[Exception]:
    """`ConfigError`, or `ImportError` if `protos` itself is shadowed."""
    try:
        from protos.errors import ConfigError  # noqa: PLC0415 - it may be the module that is shadowed
    except ImportError:
        return ImportError
    return ConfigError
