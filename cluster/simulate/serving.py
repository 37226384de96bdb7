"""Files with which `slipstream serve` and Ray Serve use what was tuned."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import yaml  # type: ignore[import-untyped]

from protos.config import argument_names

APPLICATION = {"name": "slipstream", "route_prefix": "/", "import_path": "cluster.serve:build_app"}


def tuned_arguments(given: Mapping[str, Any], model: str, speculative: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return engine arguments: those *given*, the target and the tuned speculation, None for none."""
    kept = {name: value for name, value in given.items() if value is not None}
    return {**kept, "model": model, argument_names.SPECULATIVE: None if speculative is None else dict(speculative)}


def serve_file(arguments: Mapping[str, Any], reasons: Seq[str]) -> str:
    """Return the text of a file for `slipstream serve --config`, with the *reasons* as comments."""
    return _text("slipstream serve --config FILE", reasons, arguments)


def ray_serve_file(arguments: Mapping[str, Any], reasons: Seq[str]) -> str:
    """Return the text of a file for `serve deploy`, with the *reasons* as comments."""
    return _text("serve deploy FILE", reasons, {"applications": [{**APPLICATION, "args": dict(arguments)}]})


def _text(command: str, reasons: Seq[str], content: Mapping[str, Any]) -> str:
    comments = "".join(f"# {line}\n" for line in (f"{command}; written by slipstream tune.", *reasons))
    return f"{comments}\n{yaml.safe_dump(dict(content), sort_keys=False)}"
