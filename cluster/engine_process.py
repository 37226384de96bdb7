"""The controller's own process: `python -c "... main()"`, started by `cluster.serve_http`."""

import logging
import sys

from pydantic import TypeAdapter

from cluster import assemble
from protos.config import EngineConfig
from runtime.channel import Inbox, Say
from runtime.process import serve_child

CONFIG = TypeAdapter(EngineConfig)
"""How the configuration crosses the process boundary: as JSON, validated again on the other side."""


def log_to_stderr(level: int = logging.INFO) -> None:
    """Let our log lines from *level* on reach the terminal; of others, only warnings."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    for name in ("slipstream", "protos", "proposers", "workers", "runtime", "cluster"):
        logging.getLogger(name).setLevel(level)


def build(config: str, inbox: Inbox, say: Say) -> assemble.Assembled:
    """Build the engine that *config*, as JSON, describes."""
    return assemble.build(CONFIG.validate_json(config), inbox, say)


def main() -> None:
    """Serve until the parent says stop or goes away."""
    log_to_stderr()
    serve_child(build)
