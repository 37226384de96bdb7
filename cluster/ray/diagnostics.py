"""Ray in `slipstream doctor` and `slipstream env`: whether it can be reached, and its resources."""

import ray

from cluster.ray import cluster as ray_cluster
from cluster.ray.cluster import Membership
from cluster.ray.placement import ONE_CPU, BundleLayout, fits, shortage, totals
from protos.errors import PlacementError


def examine(num_targets: int, *, has_draft: bool, device: str) -> str:
    """Join the cluster, or start one as an engine would, and describe its resources.

    Raises:
        PlacementError: it cannot be joined or started, or such an engine does not fit.
    """
    connection = ray_cluster.describe_connection()
    member = Membership(1 + num_targets + has_draft)
    try:
        worker = {**ONE_CPU, "GPU": 1.0} if device != "cpu" and _has_gpus() else dict(ONE_CPU)
        plan = BundleLayout(num_targets, has_draft, worker, "STRICT_PACK")
        if not fits(plan, [node["Resources"] for node in ray_cluster.nodes()]):
            raise PlacementError(shortage(plan))
        return f"{connection}: Ray {ray.__version__}, {resources()}"
    finally:
        member.leave()


def _has_gpus() -> bool:
    return ray_cluster.cluster_resources().get("GPU", 0.0) > 0


def resources() -> str:
    """Describe the resources of the joined cluster."""
    nodes = [node["Resources"] for node in ray_cluster.nodes()]
    has, free = totals(nodes), ray_cluster.available_resources()
    parts = [f"{free.get(name, 0.0):g} of {has.get(name, 0.0):g} {name}s free" for name in ("GPU", "CPU")]
    return f"{len(nodes)} node(s), {', '.join(parts)}"


def summary() -> str:
    """Describe the resources of the cluster at RAY_ADDRESS, or the error of joining it."""
    if not ray.is_initialized() and ray_cluster.address() is None:
        return "no cluster: RAY_ADDRESS is not set, and an engine would start one on this machine"
    try:
        member = Membership(0)
    except PlacementError as error:
        return str(error)
    try:
        return resources()
    finally:
        member.leave()
