"""`slipstream serve` in a process of its own."""

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class ServerProcess:
    """A server that answers at *url*."""

    pid: int
    url: str


@contextmanager
def served(options: Sequence[str]) -> Iterator[ServerProcess]:
    """Run a server with these options on a free port of this machine until the block ends."""
    command = [sys.executable, "-m", "cluster.cli.main", "serve", "--host=127.0.0.1", "--port=0", "--grpc-port=-1"]
    with subprocess.Popen([*command, "--disable-log-stats", *options], stderr=subprocess.PIPE, text=True) as process:
        try:
            yield ServerProcess(process.pid, _url(process))
        finally:
            process.terminate()
            process.communicate(timeout=120)


def _url(process: "subprocess.Popen[str]") -> str:
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        found = re.search(r"ready on (http://[\d.:]+)", line)
        if found is not None:
            return found[1]
    raise SystemExit("the server did not start:\n" + "".join(seen))
