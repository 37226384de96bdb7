"""The number of files that this process may open, which bounds its connections."""

import logging
import resource
from dataclasses import replace

from runtime.http.server.limits import ConnectionLimits

log = logging.getLogger("slipstream")

OWN_FILES = 256
"""Files kept for the engine: sockets to workers, weights, logs, and connections that are being refused."""
MOST_FILES = 1 << 20
"""More are never needed, and some systems set no limit."""
FEWEST_CONNECTIONS = 16


def raise_file_limit() -> int:
    """Raise the soft limit on open files to the hard one, for child processes as well; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return MOST_FILES if soft == resource.RLIM_INFINITY else soft


def within_files(limits: ConnectionLimits, num_files: int, num_servers: int) -> ConnectionLimits:
    """Return *limits* with at most as many connections as *num_files* allow each of *num_servers*."""
    room = max((num_files - OWN_FILES) // num_servers, FEWEST_CONNECTIONS)
    if room >= limits.max_connections:
        return limits
    log.warning(
        "at most %d connections at a time instead of %d: the limit on open files is %d (ulimit -Hn)",
        room,
        limits.max_connections,
        num_files,
    )
    return replace(limits, max_connections=room)
