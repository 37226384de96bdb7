"""The README's first command, from a fresh clone: it installs, serves, and the `curl` it prints gets an answer."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 600.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def readme_command() -> str:
    """Return the first command of the README's first code block."""
    block = re.search(r"```bash\n(.*?)\n```", (REPOSITORY / "README.md").read_text(), re.DOTALL)
    assert block is not None
    return block[1].splitlines()[0].split("#")[0].strip()


@pytest.mark.full
@pytest.mark.timeout(0)
def test_the_first_command_of_the_readme_serves_an_answer(tmp_path: Path) -> None:
    started = time.monotonic()
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(REPOSITORY), str(clone)], check=True)
    environment = {name: value for name, value in os.environ.items() if name not in ("VENV", "MAKEFLAGS", "MAKELEVEL")}
    command = [*shlex.split(readme_command()), f"ARGS=--port {free_port()}"]
    log = tmp_path / "log"
    with log.open("w") as out:
        server = subprocess.Popen(command, cwd=clone, env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        curl = None
        while curl is None and server.poll() is None and time.monotonic() - started < PATIENCE_S:
            time.sleep(1)
            curl = re.search(r"^\s*(curl .*)$", log.read_text(), re.MULTILINE)
        assert curl is not None, log.read_text()[-3000:]
        answer = subprocess.run(shlex.split(curl[1]), capture_output=True, check=True, timeout=120)
        seconds = time.monotonic() - started
        text = json.loads(answer.stdout)["choices"][0]["text"]
    finally:
        os.killpg(server.pid, signal.SIGINT)
        server.wait(30)
    assert text
    print(f"first answer {seconds:.0f} s after cloning: {text!r}")
    assert seconds < PATIENCE_S
