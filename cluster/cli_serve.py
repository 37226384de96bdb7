"""`slipstream serve`: from the command line to the server."""

from pathlib import Path
from typing import get_args

from cluster.cli_version import version
from cluster.serve_http import HttpOptions, serve
from protos.config import EngineConfig
from protos.errors import ConfigError
from protos.validation import shown
from runtime.http.schemas import SpecMetrics
from runtime.http.tools import ToolOptions


def run(
    config: EngineConfig,
    *,
    host: str,
    port: int,
    chat_template: str | None,
    spec_metrics: str,
    grace_s: int,
    tools: ToolOptions,
) -> None:
    """Serve until told to stop. Raises `ConfigError`, `ModelError`, `EngineDeadError`."""
    levels = get_args(SpecMetrics)
    level = next((level for level in levels if level == spec_metrics), None)
    if level is None:
        raise ConfigError(
            f"per_request_spec_decode_metrics must be one of {', '.join(levels)}, got {shown(spec_metrics)}"
        )
    serve(config, HttpOptions(version(), host, port, grace_s, _template(chat_template), level, tools))


def _template(given: str | None) -> str | None:
    """Return the template: *given* itself, if it looks like one, else what the file of that name holds."""
    if given is None or "{" in given or "\n" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"chat_template: cannot read {given}: {type(error).__name__}") from None
