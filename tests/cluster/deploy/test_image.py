"""The container image, and versions and ports that all files must agree on."""

import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import yaml

from tests.support.distributed.deployments import (
    DEPLOY,
    DOCKER_CONFIGS,
    PORTS,
    ROOT,
    SERVE_CONFIGS,
    docker_steps,
    load,
    pinned,
    pods,
    python_minor,
    tag,
    version,
)

pytestmark = pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`:DeprecationWarning")  # Ray's


def test_versions_agree() -> None:
    images = [re.search(r"image: (\S+)", path.read_text())[1] for path in DOCKER_CONFIGS]  # type: ignore[index]
    (service,) = [load(DEPLOY / "kuberay" / "base" / "rayservice.yaml")]
    images += [container["image"] for pod in pods(service) for container in pod["containers"]]
    assert {image.rpartition("/")[2] for image in images} == {tag()}
    assert service["spec"]["rayClusterConfig"]["rayVersion"] == pinned("ray")
    assert f"-t {tag()} ." in (DEPLOY / "Dockerfile").read_text()


def test_ports_agree() -> None:
    service = load(DEPLOY / "kuberay" / "base" / "rayservice.yaml")
    configs = [load(path) for path in SERVE_CONFIGS] + [yaml.safe_load(service["spec"]["serveConfigV2"])]
    assert {config["http_options"]["port"] for config in configs} == {PORTS["serve"]}
    assert {config["grpc_options"]["port"] for config in configs} == {PORTS["serve-grpc"]}
    head = pods(service)[0]["containers"][0]["ports"]
    assert {port["name"]: port["containerPort"] for port in head} == PORTS
    outside = service["spec"]["serveService"]["spec"]["ports"]
    assert {port["name"]: port["targetPort"] for port in outside} == {"serve": 8000, "serve-grpc": 9000}
    exposed = dict(docker_steps())["EXPOSE"]
    assert exposed.split() == [str(PORTS["serve"]), str(PORTS["serve-grpc"])]


def test_the_image_runs_without_root_and_has_what_probes_need() -> None:
    steps = docker_steps()
    assert [rest for word, rest in steps if word == "USER"] == ["slipstream"]
    assert steps.index(("USER", "slipstream")) > max(i for i, (word, _) in enumerate(steps) if word in ("RUN", "COPY"))
    packages = next(rest for word, rest in steps if word == "RUN" and "apt-get install" in rest)
    assert {"bash", "wget"} <= set(packages.split())
    assert any("-c constraints.txt" in rest for word, rest in steps if word == "RUN")


@pytest.mark.full
@pytest.mark.timeout(0)
def test_the_steps_of_the_image_install_what_it_starts(tmp_path: Path) -> None:
    """Docker's steps as a script: those of pip in a new environment and a copy of the tree, then what stands in CMD."""
    home, place = tmp_path / "venv", tmp_path / "slipstream"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(place)], check=True)
    venv.create(home, with_pip=True)
    defaults = dict(rest.split("=", 1) for word, rest in docker_steps() if word == "ARG")
    environment = {**os.environ, "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}", **defaults}
    for word, rest in docker_steps():
        if word == "RUN" and rest.startswith(("pip ", "slipstream ")):
            subprocess.run(
                ["bash", "-euc", rest.replace(' --index-url "$TORCH_INDEX"', "")],
                cwd=place,
                env=environment,
                check=True,
            )
    command = json.loads(dict(docker_steps())["CMD"])
    said = subprocess.run(
        [home / "bin" / command[0], "--version"],
        cwd=tmp_path,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    assert version() in said.stdout
    assert sys.version_info[:2] == (3, int(python_minor()[1:])), "run by another Python than the image has"
