"""The controller's own process: `python -c "... main()"`, started by `cluster.serving.http_server`."""

from cluster import assemble
from protos.config.engine import from_json
from protos.interfaces import Inbox
from protos.progress import ProgressCallback
from runtime.core.controller import Controller
from runtime.frontend.controller_process import serve_child
from runtime.metrics.logs import log_to_stderr


def build(config: str, inbox: Inbox, say: ProgressCallback) -> Controller:
    """Build the engine that *config*, as JSON, describes, and return its controller."""
    parsed = from_json(config)
    log_to_stderr(parsed.log_format)
    return assemble.build(parsed, inbox, say).controller


def main() -> None:
    """Serve until the parent says stop or goes away."""
    serve_child(build)
