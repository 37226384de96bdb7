"""`cluster/deploy/start_once.sh`, with a `ray` that records how it was called."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.distributed.deployments import DEPLOY

RAY = """#!/bin/bash
echo "$@" >> ~/calls
case "$1" in
    health-check) test -e ~/healthy;;
    stop) rm -f ~/healthy;;
    start) touch ~/healthy;;
esac
"""
START = ("ray", "start", "--head", "--port=6379")


class Head:
    """A home with a checkout, a configuration of `ray up`, and a `ray` that starts nothing."""

    def __init__(self, home: Path) -> None:
        self.home = home
        (home / "bin").mkdir()
        (home / "bin" / "ray").write_text(RAY)
        (home / "bin" / "ray").chmod(0o755)
        self.code = home / "slipstream"
        (self.code / "cluster" / "deploy").mkdir(parents=True)
        (self.code / "slipstream.py").write_text("version = 1\n")
        shutil.copy(DEPLOY / "start_once.sh", self.code / "cluster" / "deploy")
        self.configure()

    def configure(self, **values: object) -> None:
        """Write what `ray up` puts on the head."""
        configuration = {"cluster_name": "slipstream", "no_restart": False, **values}
        (self.home / "ray_bootstrap_config.yaml").write_text(json.dumps(configuration))

    def start(self, *words: str) -> list[str]:
        """Run the script; return what `ray` was called for, in order."""
        (self.home / "calls").unlink(missing_ok=True)
        script = self.code / "cluster" / "deploy" / "start_once.sh"
        environment = {"HOME": str(self.home), "PATH": f"{self.home / 'bin'}:{os.environ['PATH']}"}
        subprocess.run(["bash", script, *(words or START)], env=environment, check=True, capture_output=True)
        return [line.split()[0] for line in (self.home / "calls").read_text().splitlines()]


RESTARTED = ["stop", "start"]


@pytest.fixture
def head(tmp_path: Path) -> Head:
    made = Head(tmp_path)
    assert made.start() == RESTARTED
    return made


def test_a_head_that_is_up_to_date_is_left_alone(head: Head) -> None:
    assert head.start() == ["health-check"]
    (head.code / "__pycache__").mkdir()
    (head.code / "__pycache__" / "slipstream.cpython-311.pyc").write_text("compiled")
    (head.code / ".venv").mkdir()
    (head.code / ".venv" / "pyvenv.cfg").write_text("home = /usr/bin")
    head.configure(no_restart=True)
    assert head.start() == ["health-check"]


def test_changed_code_configuration_or_command_restarts_it(head: Head) -> None:
    (head.code / "slipstream.py").write_text("version = 2\n")
    assert head.start() == RESTARTED
    head.configure(max_workers=2)
    assert head.start() == RESTARTED
    assert head.start(*START, "--num-cpus=0") == RESTARTED
    assert head.start(*START, "--num-cpus=0") == ["health-check"]


def test_a_head_that_is_down_is_started(head: Head) -> None:
    (head.home / "healthy").unlink()
    assert head.start() == ["health-check", *RESTARTED]


def test_a_start_that_fails_is_tried_again(head: Head) -> None:
    (head.code / "slipstream.py").write_text("version = 2\n")
    with pytest.raises(subprocess.CalledProcessError):
        head.start("false")
    assert head.start() == RESTARTED
