"""What stands in cluster/ is taken by those who read it: Ray, KubeRay, Ray Serve, Docker; and its parts agree."""

import copy
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.ray_serve.arguments import ServeArguments
from tests.support.distributed.deployments import (
    DEPLOY,
    NODE_CONFIGS,
    OVERLAYS,
    ROOT,
    SCHEMAS,
    SERVE_CONFIGS,
    docker_steps,
    filled,
    has_kubectl,
    kustomized,
    load,
    of_kind,
    strict,
    unknown_keys,
)

pytestmark = pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`:DeprecationWarning")  # Ray's
needs_kubectl = pytest.mark.skipif(not has_kubectl(), reason="kubectl, which has kustomize in it, is not here")
PORTS = {"serve": 8000, "serve-grpc": 9000, "dashboard": 8265, "gcs-server": 6379, "metrics": 8080, "client": 10001}


def pinned(name: str) -> str:
    found = re.search(rf"^{re.escape(name)}==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def version() -> str:
    found = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def python_minor() -> str:
    """Return the image's Python as tags spell it: 311."""
    found = re.search(r"^FROM python:3\.(\d+)-", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert found is not None
    return f"3{found[1]}"


def tag() -> str:
    return f"slipstream:{version()}-ray{pinned('ray')}-py{python_minor()}"


# Clusters of nodes.


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
    assert head.startswith("RAY_AUTH_MODE=token ray start --head ")
    assert workers.startswith("RAY_AUTH_MODE=token ray start --address=$RAY_HEAD_IP:6379")
    assert "--dashboard-host=127.0.0.1 --dashboard-port=8265" in head
    assert "~/.ray/auth_token" in config["file_mounts"]
    assert all(f"--metrics-export-port={PORTS['metrics']}" in line for line in (head, workers))
    assert f"--port={PORTS['gcs-server']}" in head


@pytest.mark.parametrize("path", NODE_CONFIGS, ids=lambda path: path.name)
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


@pytest.mark.parametrize("path", NODE_CONFIGS[1:], ids=lambda path: path.name)
def test_a_worker_of_a_cloud_holds_a_replica_of_the_8b_pair_and_the_head_none(path: Path) -> None:
    types = load(path)["available_node_types"]
    assert types["head"]["resources"] == {"CPU": 0}
    needed = total_of(load(DEPLOY / "serve" / "config-8b.yaml"))
    assert all(types["gpu"]["resources"][name] >= amount for name, amount in needed.items())


# Ray Serve.


def arguments(config: dict[str, Any]) -> ServeArguments:
    return ServeArguments.model_validate(config["applications"][0]["args"])


def total_of(config: dict[str, Any]) -> dict[str, float]:
    """Return what one replica takes of a cluster that has GPUs, where it may use them."""
    from cluster.ray.placement import layout, totals
    from cluster.ray_serve.deployment import bundles

    engine = arguments(config).config
    return totals(bundles(layout(engine, {"GPU": 8.0}), engine))


def judged(config: dict[str, Any]) -> list[str]:
    """Return the keys of a Serve config that nobody knows, having had the rest judged by Serve."""
    from ray.serve.schema import ServeDeploySchema

    ServeDeploySchema.model_validate(config)
    return unknown_keys(config, ServeDeploySchema)


@pytest.mark.parametrize("path", SERVE_CONFIGS, ids=lambda path: path.name)
def test_serve_knows_every_key(path: Path) -> None:
    config = load(path)
    assert judged(config) == []
    assert arguments(config).config.model.model
    typo = copy.deepcopy(config)
    typo["grpc_options"]["prot"] = 9000
    typo["applications"][0]["deployments"][0]["max_ongoing_request"] = 1
    assert judged(typo) == ["grpc_options.prot", "applications.deployments.max_ongoing_request"]


@pytest.mark.parametrize("path", SERVE_CONFIGS, ids=lambda path: path.name)
def test_what_a_serve_config_names_is_there(path: Path) -> None:
    from cluster.ray_serve.deployment import NAME

    config, application = load(path), load(path)["applications"][0]
    named = [
        *config["grpc_options"]["grpc_servicer_functions"],
        application["import_path"].replace(":", "."),
        *config["controller_options"]["runtime_env"]["env_vars"].values(),
    ]
    for name in named:
        module, _, attribute = name.rpartition(".")
        assert callable(getattr(importlib.import_module(module), attribute)), name
    assert [each["name"] for each in application["deployments"]] == [NAME]


def test_replicas_are_told_to_stop_late_enough() -> None:
    """An answer as long as the context must end before its replica does, even at ten tokens a second a stream."""
    settings = arguments(load(DEPLOY / "serve" / "config-8b.yaml"))
    assert settings.server.drain_timeout_s >= 900
    for overlay, resources in manifests().items():
        service = of_kind(resources, "RayService")[0]
        drain_s = arguments(yaml.safe_load(service["spec"]["serveConfigV2"])).server.drain_timeout_s
        for pod in pods(service):
            assert pod["terminationGracePeriodSeconds"] > drain_s, overlay


def test_the_8b_pair_takes_three_gpus_on_one_node() -> None:
    assert total_of(load(DEPLOY / "serve" / "config-8b.yaml")) == {"GPU": 3.0, "CPU": 5.0}
    assert total_of(load(DEPLOY / "serve" / "config.yaml")) == {"CPU": 1.0}


# KubeRay.


def manifests() -> dict[str, list[dict[str, Any]]]:
    """Return the resources by overlay; without kubectl only what stands in a file as it is."""
    if has_kubectl():
        return {overlay: kustomized(overlay) for overlay in OVERLAYS}
    return {"base": [load(DEPLOY / "kuberay" / "base" / "rayservice.yaml")]}


def pods(service: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = service["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


def complaints(service: dict[str, Any]) -> list[str]:
    import jsonschema

    schema = json.loads((SCHEMAS / "rayservices.v1.schema.json").read_text())
    body = {key: value for key, value in filled(service, schema).items() if key != "metadata"}
    return [error.message for error in jsonschema.Draft7Validator(strict(schema)).iter_errors(body)]


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kuberay_takes_it(overlay: str) -> None:
    (service,) = of_kind(kustomized(overlay), "RayService")
    assert complaints(service) == []
    service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]["imagePullPolciy"] = "x"
    assert any("imagePullPolciy" in text for text in complaints(service))


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_manifest_serves_what_the_shipped_config_does(overlay: str) -> None:
    (service,) = of_kind(kustomized(overlay), "RayService")
    inside = yaml.safe_load(service["spec"]["serveConfigV2"])
    assert judged(inside) == []
    shipped = load(DEPLOY / "serve" / ("config.yaml" if overlay == "overlays/dev" else "config-8b.yaml"))
    if overlay == "overlays/dev":
        shipped["applications"][0]["deployments"][0]["num_replicas"] = 1
    assert inside == shipped


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_are_locked_down_and_ask_for_the_token(overlay: str) -> None:
    (service,) = of_kind(kustomized(overlay), "RayService")
    assert service["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}
    for pod in pods(service):
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert not {"livenessProbe", "readinessProbe"} & container.keys()  # the operator's own ask the right things
    memory = [volume for volume in pods(service)[1]["volumes"] if volume["name"] == "shm"]
    assert memory[0]["emptyDir"]["medium"] == "Memory"
    assert {"name": "shm", "mountPath": "/dev/shm"} in pods(service)[1]["containers"][0]["volumeMounts"]


@needs_kubectl
def test_a_gpu_pod_holds_a_replica() -> None:
    (service,) = of_kind(kustomized("overlays/prod"), "RayService")
    resources = pods(service)[1]["containers"][0]["resources"]
    needed = total_of(yaml.safe_load(service["spec"]["serveConfigV2"]))
    assert resources["limits"]["nvidia.com/gpu"] == resources["requests"]["nvidia.com/gpu"] == needed["GPU"]
    assert float(resources["requests"]["cpu"]) >= needed["CPU"]


@needs_kubectl
def test_the_state_of_a_productive_cluster_outlives_its_head() -> None:
    resources = kustomized("overlays/prod")
    (service,) = of_kind(resources, "RayService")
    options = service["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    redis = next(each for each in of_kind(resources, "Service") if each["metadata"]["name"] == "redis")
    host, _, port = options["redisAddress"].partition(":")
    assert (host, int(port)) == ("redis", redis["spec"]["ports"][0]["port"])
    (store,) = of_kind(resources, "StatefulSet")
    assert store["spec"]["template"]["metadata"]["labels"].items() >= redis["spec"]["selector"].items()
    wanted = options["redisPassword"]["valueFrom"]
    assert store["spec"]["template"]["spec"]["containers"][0]["env"][0]["valueFrom"] == wanted


# All together.


def test_versions_agree() -> None:
    images = [re.search(r"image: (\S+)", path.read_text())[1] for path in NODE_CONFIGS]  # type: ignore[index]
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


def test_the_image_runs_as_nobody_special_and_has_what_probes_need() -> None:
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
    environment = {**os.environ, "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}", **defaults, "EXTRAS": ""}
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
