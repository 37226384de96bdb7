"""Kubernetes manifests for KubeRay."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.distributed.deployments import (
    CONFIG_OF,
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
    rendered,
    strict,
    total_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`:DeprecationWarning")  # Ray's
needs_kubectl = pytest.mark.skipif(not has_kubectl(), reason="kubectl, which has kustomize in it, is not here")


GPU_OVERLAYS = ["overlays/prod", "overlays/one-gpu"]
CORE = SCHEMAS / "kubernetes-1.34.schema.json"


def complaints(resource: dict[str, Any]) -> list[str]:
    """Return what the schema of a resource's kind says against it."""
    if resource["kind"] == "RayService":
        return complaints_of_kuberay(resource)
    import jsonschema

    core = json.loads(CORE.read_text())
    schema = {**core["kinds"][resource["kind"]], "$defs": core["$defs"]}
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(resource)]


def complaints_of_kuberay(service: dict[str, Any]) -> list[str]:
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
def test_kubernetes_takes_what_stands_beside_it() -> None:
    resources = [each for each in kustomized("overlays/prod") if each["kind"] != "RayService"]
    assert {each["kind"] for each in resources} == {"NetworkPolicy", "PodDisruptionBudget", "Service", "StatefulSet"}
    for resource in resources:
        assert complaints(resource) == []
        resource["spec"]["podSelecter"] = {}
        assert any("podSelecter" in text for text in complaints(resource)), resource["kind"]


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_manifest_serves_what_the_shipped_config_does(overlay: str) -> None:
    (service,) = of_kind(kustomized(overlay), "RayService")
    inside = yaml.safe_load(service["spec"]["serveConfigV2"])
    assert judged(inside) == []
    shipped = load(DEPLOY / "serve" / CONFIG_OF[overlay])
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
@pytest.mark.parametrize("overlay", GPU_OVERLAYS)
def test_a_gpu_pod_holds_a_replica(overlay: str) -> None:
    (service,) = of_kind(kustomized(overlay), "RayService")
    resources = pods(service)[1]["containers"][0]["resources"]
    needed = total_of(yaml.safe_load(service["spec"]["serveConfigV2"]))
    assert resources["limits"]["nvidia.com/gpu"] == resources["requests"]["nvidia.com/gpu"] == needed["GPU"]
    assert float(resources["requests"]["cpu"]) >= needed["CPU"]
    assert pods(service)[1]["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    assert [each["key"] for each in pods(service)[1]["tolerations"]] == ["nvidia.com/gpu"]


@needs_kubectl
@pytest.mark.parametrize("overlay", GPU_OVERLAYS)
def test_pods_follow_replicas(overlay: str) -> None:
    (service,) = of_kind(kustomized(overlay), "RayService")
    cluster = service["spec"]["rayClusterConfig"]
    assert cluster["enableInTreeAutoscaling"] is True
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    scaling, (group,) = application["deployments"][0]["autoscaling_config"], cluster["workerGroupSpecs"]
    assert group["minReplicas"] <= scaling["min_replicas"]
    assert group["maxReplicas"] >= scaling["max_replicas"]


@needs_kubectl
def test_an_upgrade_may_be_incremental(tmp_path: Path) -> None:
    folder = Path(os.path.relpath(DEPLOY / "kuberay", tmp_path.resolve()))
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [str(folder / "overlays" / "prod")],
        "components": [str(folder / "components" / "incremental-upgrade")],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    (service,) = of_kind(list(yaml.safe_load_all(rendered(tmp_path.resolve()))), "RayService")
    assert complaints(service) == []
    strategy = service["spec"]["upgradeStrategy"]
    assert strategy["type"] == "NewClusterWithIncrementalUpgrade"
    assert service["spec"]["rayClusterConfig"]["enableInTreeAutoscaling"] is True, "KubeRay requires it"
    del strategy["clusterUpgradeOptions"]["gatewayClassName"]
    assert complaints(service) == ["'gatewayClassName' is a required property"]


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Return whether a label selector matches."""
    exists = [each["key"] for each in selector.get("matchExpressions", []) if each["operator"] == "Exists"]
    return labels.items() >= selector.get("matchLabels", {}).items() and set(exists) <= labels.keys()


POD = {"ray.io/cluster": "slipstream-abcde"}
WORKER = {**POD, "ray.io/node-type": "worker", "ray.io/group": "gpu"}


@needs_kubectl
@pytest.mark.parametrize(
    ("peer", "redis_port", "ray_ports"),
    [
        (WORKER, True, {None}),
        ({"app.kubernetes.io/name": "kuberay-operator"}, False, {8265, 8000, 9000}),
        ({"app.kubernetes.io/name": "prometheus"}, False, {8080, 8000, 9000}),
        ({"app": "anything else"}, False, {8000, 9000}),
    ],
)
def test_who_reaches_whom(peer: dict[str, str], redis_port: bool, ray_ports: set[int | None]) -> None:
    policies = {
        each["metadata"]["name"]: each["spec"] for each in of_kind(kustomized("overlays/prod"), "NetworkPolicy")
    }
    assert selects(policies["slipstream"]["podSelector"], WORKER)
    assert selects(policies["redis"]["podSelector"], {"app": "redis"})
    assert admitted(policies["redis"], peer) == ({6379} if redis_port else set())
    assert admitted(policies["slipstream"], peer) >= ray_ports
    assert None in ray_ports or admitted(policies["slipstream"], peer) == ray_ports


def admitted(policy: dict[str, Any], peer: dict[str, str]) -> set[int | None]:
    """Return the ports on which a policy admits a pod with these labels; None stands for all."""
    assert "Egress" in policy["policyTypes"]
    rules = [
        rule
        for rule in policy["ingress"]
        if "from" not in rule or any(selects(each["podSelector"], peer) for each in rule["from"])
    ]
    return {port["port"] for rule in rules for port in rule.get("ports", [{"port": None}])}


@needs_kubectl
def test_a_drain_leaves_a_worker() -> None:
    resources = kustomized("overlays/prod")
    (budget,) = of_kind(resources, "PodDisruptionBudget")
    (service,) = of_kind(resources, "RayService")
    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert selects(budget["spec"]["selector"], {**WORKER, "ray.io/group": group["groupName"]})
    assert not selects(budget["spec"]["selector"], {**POD, "ray.io/node-type": "head", "ray.io/group": "headgroup"})
    assert budget["spec"]["minAvailable"] == 1
    assert "maxUnavailable" not in budget["spec"], "not for pods of a RayCluster, which has no scale subresource"


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
