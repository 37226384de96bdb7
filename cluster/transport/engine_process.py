"""The controller's child process, started by `cluster.channels.process_channel`."""

from cluster import assemble
from protos.config.engine import from_json
from protos.interfaces import Inbox
from protos.progress import ProgressCallback
from runtime.core.controller import Controller
from runtime.frontend.controller_process import serve_child
from runtime.metrics.logs import log_to_stderr


def build(config: str, inbox: Inbox, report: ProgressCallback) -> Controller:
    """Build the engine of *config*, JSON text, and return its controller."""
    parsed = from_json(config)
    log_to_stderr(parsed.log_format)
    return assemble.build_controller(parsed, inbox, report)


def main() -> None:
    """Serve until the parent sends stop or exits."""
    serve_child(build)
