"""Reading and validating the files that deploy Slipstream."""

import copy
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from cluster.ray_serve.arguments import ServeArguments

ROOT = Path(__file__).parents[3]
CLUSTER = ROOT / "cluster"
DEPLOY = CLUSTER / "deploy"
SCHEMAS = ROOT / "tests" / "support" / "kuberay"
SERVE_CONFIGS = sorted((DEPLOY / "serve").glob("*.yaml"))
CLOUD_CONFIGS = [DEPLOY / "aws.yaml", DEPLOY / "gcp.yaml"]
DOCKER_CONFIGS = [CLUSTER / "cluster.yaml", *CLOUD_CONFIGS]
OWN_CONFIGS = [CLUSTER / "cluster.yaml", CLUSTER / "cluster-venv.yaml"]
NODE_CONFIGS = [*OWN_CONFIGS, *CLOUD_CONFIGS]
OVERLAYS = ["base", "overlays/dev", "overlays/prod", "overlays/one-gpu"]
CONFIG_OF = dict.fromkeys(OVERLAYS, "config-8b.yaml") | {
    "overlays/dev": "config.yaml",
    "overlays/one-gpu": "config-8b-one-gpu.yaml",
}
"""The file that says the same as an overlay's `serveConfigV2`."""


def load(path: Path) -> dict[str, Any]:
    loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def kustomized(overlay: str) -> list[dict[str, Any]]:
    """Return the resources of an overlay as `kubectl apply -k` would send them."""
    return list(yaml.safe_load_all(_kustomize(overlay)))


@cache
def _kustomize(overlay: str) -> str:
    return rendered(DEPLOY / "kuberay" / overlay)


def rendered(folder: Path) -> str:
    """Return what kustomize makes of a folder."""
    ran = subprocess.run(
        ["kubectl", "kustomize", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def has_kubectl() -> bool:
    return shutil.which("kubectl") is not None


def of_kind(resources: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [resource for resource in resources if resource["kind"] == kind]


def strict(schema: Any) -> Any:
    """Return *schema* with unknown fields refused, and Kubernetes' own `int or string` spelled out."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("anyOf", None)
        made["type"] = ["integer", "string"]
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made


def filled(value: Any, schema: dict[str, Any]) -> Any:
    """Return *value* with the schema's defaults, which the API server fills in before validation."""
    if isinstance(value, list):
        return [filled(each, schema.get("items", {})) for each in value]
    if not isinstance(value, dict):
        return value
    known = schema.get("properties", {})
    value = {key: filled(each, known.get(key, {})) for key, each in value.items()}
    for key, part in known.items():
        if "default" in part:
            value.setdefault(key, copy.deepcopy(part["default"]))
    return value


def unknown_keys(given: Any, model: type[BaseModel], where: str = "") -> list[str]:
    """Return the keys of *given* that *model* does not have, at any depth; Serve itself would ignore them."""
    found = []
    for key, value in given.items():
        field = model.model_fields.get(key)
        if field is None:
            found.append(f"{where}{key}")
            continue
        inner = [kind for kind in _kinds(field.annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)]
        parts = value if isinstance(value, list) else [value]
        for part in parts:
            if inner and isinstance(part, dict):
                found += min((unknown_keys(part, kind, f"{where}{key}.") for kind in inner), key=len)
    return found


def _kinds(annotation: Any) -> list[Any]:
    arguments = getattr(annotation, "__args__", ())
    return [annotation] if not arguments else [kind for each in arguments for kind in _kinds(each)]


def docker_steps() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions in order, continuation lines joined."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]
    return [(word, " ".join(rest.split())) for word, _, rest in (line.partition(" ") for line in lines)]


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
    """Return the image's Python version as in tags, e.g. 311."""
    found = re.search(r"^FROM python:3\.(\d+)-", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert found is not None
    return f"3{found[1]}"


def tag() -> str:
    return f"slipstream:{version()}-ray{pinned('ray')}-py{python_minor()}"


def arguments(config: dict[str, Any]) -> ServeArguments:
    return ServeArguments.model_validate(config["applications"][0]["args"])


def total_of(config: dict[str, Any]) -> dict[str, float]:
    """Return the resources of one replica on a cluster with GPUs."""
    from cluster.ray.placement import layout, totals
    from cluster.ray_serve.deployment import bundles

    engine = arguments(config).config
    return totals(bundles(layout(engine, {"GPU": 8.0}), engine))


def judged(config: dict[str, Any]) -> list[str]:
    """Validate a Serve config by Serve; return the keys that Serve ignores."""
    from ray.serve.schema import ServeDeploySchema

    ServeDeploySchema.model_validate(config)
    return unknown_keys(config, ServeDeploySchema)


def manifests() -> dict[str, list[dict[str, Any]]]:
    """Return the resources by overlay; without kubectl only the base's RayService."""
    if has_kubectl():
        return {overlay: kustomized(overlay) for overlay in OVERLAYS}
    return {"base": [load(DEPLOY / "kuberay" / "base" / "rayservice.yaml")]}


def pods(service: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = service["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]
