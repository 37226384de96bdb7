"""The controller's own process: `python -c "... main()"`, started by `cluster.serving.http_server`."""

from pydantic import TypeAdapter

from cluster import assemble
from protos.config.engine import EngineConfig
from protos.interfaces import Inbox
from protos.progress import ProgressCallback
from runtime.frontend.process_channel import serve_child
from runtime.metrics.logs import log_to_stderr

CONFIG = TypeAdapter(EngineConfig)
"""How the configuration crosses the process boundary: as JSON, validated again on the other side."""


def build(config: str, inbox: Inbox, say: ProgressCallback) -> assemble.Assembled:
    """Build the engine that *config*, as JSON, describes."""
    parsed = CONFIG.validate_json(config)
    log_to_stderr(parsed.log_format)
    return assemble.build(parsed, inbox, say)


def main() -> None:
    """Serve until the parent says stop or goes away."""
    serve_child(build)
