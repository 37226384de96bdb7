"""Kubernetes manifests for KubeRay."""

import json
from typing import Any

import pytest
import yaml

from tests.support.distributed.deployments import (
    DEPLOY,
    OVERLAYS,
    SCHEMAS,
    filled,
    has_kubectl,
    judged,
    kustomized,
    load,
    of_kind,
    pods,
    strict,
    total_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`:DeprecationWarning")  # Ray's
needs_kubectl = pytest.mark.skipif(not has_kubectl(), reason="kubectl, which has kustomize in it, is not here")


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
