"""Cluster configs for `ray up`."""

import copy
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.support.distributed.deployments import (
    CLOUD_CONFIGS,
    DEPLOY,
    DOCKER_CONFIGS,
    NODE_CONFIGS,
    OWN_CONFIGS,
    PORTS,
    ROOT,
    load,
    total_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`:DeprecationWarning")  # Ray's


def validated(config: dict[str, Any]) -> dict[str, Any]:
    """Return *config* as `ray up` completes it, having had it judged."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(copy.deepcopy(config))
    validate_config(prepared)
    return prepared


@pytest.mark.parametrize("path", NODE_CONFIGS, ids=lambda path: path.name)
def test_ray_up_takes_it(path: Path) -> None:
    prepared = validated(load(path))
    assert prepared["available_node_types"]
    with pytest.raises(Exception, match="idle_timout_minutes"):
        validated({**load(path), "idle_timout_minutes": 5})


@pytest.mark.parametrize("path", NODE_CONFIGS, ids=lambda path: path.name)
def test_nodes_ask_for_the_token_and_keep_the_dashboard_to_themselves(path: Path) -> None:
    config = load(path)
    head, workers = config["head_start_ray_commands"][-1], config["worker_start_ray_commands"][-1]
    for line, words in ((head, "start_once.sh ray start --head "), (workers, "--address=$RAY_HEAD_IP:6379 ")):
        assert line.startswith("RAY_AUTH_MODE=token ")
        assert words in line
    assert "--dashboard-host=127.0.0.1 --dashboard-port=8265" in head
    assert "~/.ray/auth_token" in config["file_mounts"]
    assert all(f"--metrics-export-port={PORTS['metrics']}" in line for line in (head, workers))
    assert f"--port={PORTS['gcs-server']}" in head


@pytest.mark.parametrize("path", OWN_CONFIGS, ids=lambda path: path.name)
def test_machines_of_ones_own_are_started_by_the_autoscaler_that_starts_them(path: Path) -> None:
    config = load(path)
    assert config["provider"]["type"] == "local"
    assert " RAY_enable_autoscaler_v2=0 bash " in config["head_start_ray_commands"][-1]


@pytest.mark.parametrize("path", CLOUD_CONFIGS, ids=lambda path: path.name)
def test_clouds_have_the_autoscaler_that_ray_chooses(path: Path) -> None:
    assert "autoscaler_v2" not in path.read_text()


def test_machines_without_docker_get_all_that_is_installed() -> None:
    mounts = load(OWN_CONFIGS[1])["file_mounts"]
    sent = {local for place, local in mounts.items() if place == f"~/slipstream/{local}"}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {name.rstrip("*") for name in settings["tool"]["setuptools"]["packages"]["find"]["include"]}
    modules = {f"{name}.py" for name in settings["tool"]["setuptools"]["py-modules"]}
    others = {"pyproject.toml", "constraints.txt", settings["project"]["readme"]}
    assert sent == packages | modules | others
    assert len(mounts) == len(sent) + 1  # and the token
    assert all((ROOT / name).exists() for name in sent)


@pytest.mark.parametrize("path", DOCKER_CONFIGS, ids=lambda path: path.name)
def test_the_container_that_ray_starts_finds_token_and_devices(path: Path) -> None:
    from ray.autoscaler._private.docker import docker_start_cmds

    docker = load(path)["docker"]
    (home,) = re.findall(r"^ENV HOME=(.+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    mounts = {"~/.ray/auth_token": "~/.ray/auth_token"}
    words = shlex.split(
        docker_start_cmds(
            "ubuntu",
            docker["image"],
            mounts,
            docker["container_name"],
            docker["run_options"],
            "slipstream",
            home,
            "docker",
        )
    )
    assert [word for word in words if word.startswith("--net")] == ["--net=host"], "Docker takes no network twice"
    assert "--env=NVIDIA_VISIBLE_DEVICES=all" in words
    assert any(word.endswith(":/home/slipstream/.ray/auth_token") for word in words)


@pytest.mark.parametrize("path", CLOUD_CONFIGS, ids=lambda path: path.name)
def test_a_worker_of_a_cloud_holds_a_replica_of_the_8b_pair_and_the_head_none(path: Path) -> None:
    types = load(path)["available_node_types"]
    assert types["head"]["resources"] == {"CPU": 0}
    needed = total_of(load(DEPLOY / "serve" / "config-8b.yaml"))
    assert all(types["gpu"]["resources"][name] >= amount for name, amount in needed.items())
