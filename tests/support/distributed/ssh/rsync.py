"""What `ray up` asks of rsync, for machines without it: `rsync --rsh SSH -avz [--exclude P] SOURCE USER@HOST:TARGET`.

Everything is sent, by tar, and nothing on the other side is deleted. Needs nothing but Python and tar.
"""

import argparse
import shlex
import subprocess
import sys
from pathlib import Path


def main(arguments: list[str]) -> int:
    """Send a file or a folder; return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rsh", required=True)
    parser.add_argument("-a", "-v", "-z", action="store_true", dest="_")
    parser.add_argument("--exclude", action="append", default=[])
    parser.add_argument("source")
    parser.add_argument("target")
    asked = parser.parse_args(arguments)
    host, _, target = asked.target.partition(":")
    source = Path(asked.source).expanduser()
    if source.is_dir():
        folder, what = (source, ".") if asked.source.endswith("/") else (source.parent, source.name)
        unpack = f"mkdir -p {target} && tar -x -C {target}"
    else:
        folder, what = source.parent, source.name
        file = f"{target}{what}" if target.endswith("/") else target
        unpack = f"mkdir -p $(dirname {file}) && tar -x -O > {file} && chmod {source.stat().st_mode & 0o777:o} {file}"
    excluded = [f"--exclude={pattern}" for pattern in asked.exclude]
    with subprocess.Popen(["tar", "-c", "-C", folder, *excluded, what], stdout=subprocess.PIPE) as packed:
        return subprocess.run([*shlex.split(asked.rsh), host, unpack], stdin=packed.stdout, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
