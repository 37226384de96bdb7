"""Names whatever stands in the way of Slipstream's own top-level packages.

`runtime`, `workers`, `demo` and the like are common names. A folder of that name in the working directory or
in another installed package would be imported in place of ours, and fail far from the cause.
"""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

NAMES = ("slipstream", "protos", "proposers", "workers", "runtime", "cluster", "demo")
_HOME = Path(__file__).resolve().parent.parent


def check() -> None:
    """Return if every top-level name of ours leads to our own files.

    Raises:
        ConfigError: names each stranger and its path.
    """
    strangers = [f"`{name}` is {place}" for name in NAMES if (place := _stranger(name)) is not None]
    if strangers:
        raise _error_type()(
            f"Slipstream lives in {_HOME}, but Python would import other code under its names: {'; '.join(strangers)}. "
            "Start from another directory, or remove that path from PYTHONPATH or that package from the environment."
        )


def _stranger(name: str) -> str | None:
    """Return where *name* leads if that is not our file, else None; imports nothing."""
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
    except ValueError:  # loaded without a spec, as a script run by path is
        return None


def _error_type() -> type[Exception]:
    """`ConfigError`, unless `protos` itself is what cannot be reached."""
    try:
        from protos.errors import ConfigError  # noqa: PLC0415 - it may be the module that is shadowed
    except ImportError:
        return ImportError
    return ConfigError
