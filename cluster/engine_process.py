"""The controller's own process: `python -c "... main()"`, started by `cluster.serve_http`."""

from pydantic import TypeAdapter

from cluster import assemble
from protos.config import EngineConfig
from runtime.channel import Inbox, Say
from runtime.logs import log_to_stderr
from runtime.process import serve_child

CONFIG = TypeAdapter(EngineConfig)
"""How the configuration crosses the process boundary: as JSON, validated again on the other side."""


def build(config: str, inbox: Inbox, say: Say) -> assemble.Assembled:
    """Build the engine that *config*, as JSON, describes."""
    parsed = CONFIG.validate_json(config)
    log_to_stderr(parsed.log_format)
    return assemble.build(parsed, inbox, say)


def main() -> None:
    """Serve until the parent says stop or goes away."""
    serve_child(build)
