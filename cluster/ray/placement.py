"""One placement group per replica: a bundle for the controller, one for each target rank, one for the draft."""

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.ray import cluster as ray_cluster
from protos.config.engine import EngineConfig
from protos.errors import ConfigError, PlacementError
from protos.progress import ProgressCallback
from protos.worker_messages import WorkerId
from runtime.supervision.draft_supervisor import has_draft_worker

Resources = Mapping[str, float]

CONTROLLER = 0
POLL_S = 1
"""Whole seconds: Ray truncates fractions, so 0.5 would poll without a pause."""
FIRST_REPORT_S = 2.0
REPORT_EVERY_S = 30.0
ONE_CPU = {"CPU": 1.0}
REMEDIES = (
    "add devices or nodes, lower tensor_parallel_size, let the draft share the target's device (placement: colocated), "
    "or set what a worker requests with worker_resources"
)


@dataclass(frozen=True)
class BundleLayout:
    """The bundles of a replica, and Ray's strategy for placing them.

    Attributes:
        worker: the resources of each worker's bundle.
    """

    num_targets: int
    has_draft: bool
    worker: dict[str, float]
    strategy: str

    @property
    def bundles(self) -> list[dict[str, float]]:
        """The bundles of the controller, the target ranks in order, and the draft."""
        return [ONE_CPU, *[self.worker] * (self.num_targets + self.has_draft)]

    def bundle_of(self, worker: WorkerId) -> int:
        """Return the index of *worker*'s bundle, the same for every incarnation."""
        return 1 + (worker.rank if worker.role == "target" else self.num_targets)


def layout(config: EngineConfig, cluster: Resources) -> BundleLayout:
    """Return the bundles of *config*; each worker requests a GPU if *cluster* has any and the device may be CUDA.

    Raises:
        PlacementError: the device is cuda and there is no GPU; or workers would use GPUs that they do not request.
        ConfigError: target ranks would share a GPU, which NCCL does not allow.
    """
    parallel, has_gpus = config.parallel, cluster.get("GPU", 0.0) > 0
    if config.model.device == "cuda" and not has_gpus:
        raise PlacementError(
            "device is cuda, and the Ray cluster has no GPU; use device='cpu', or join a cluster with "
            "GPUs through RAY_ADDRESS"
        )
    if parallel.worker_resources is not None:
        worker = dict(parallel.worker_resources)
        if has_gpus and config.model.device != "cpu" and "GPU" not in worker:
            raise PlacementError(
                f"worker_resources {worker} has no GPU: workers would use GPUs that Ray may give to "
                "others; add \"GPU\": 1, or use device='cpu'"
            )
        if has_gpus and config.model.device != "cpu":
            _check_shares(worker, config)
    else:
        worker = {**ONE_CPU, "GPU": 1.0} if has_gpus and config.model.device != "cpu" else dict(ONE_CPU)
    return BundleLayout(parallel.tensor_parallel_size, has_draft_worker(config), worker, parallel.placement_strategy)


def _check_shares(worker: dict[str, float], config: EngineConfig) -> None:
    """Raise `ConfigError` if workers would share a GPU that cannot: target ranks use NCCL, caches take what is free."""
    num_targets, cache = config.parallel.tensor_parallel_size, config.cache
    if worker.get("GPU", 1.0) >= 1.0:
        return
    if has_draft_worker(config) and (cache.num_blocks or cache.memory_bytes) is None:
        raise ConfigError(
            f"worker_resources {worker} lets the target and the draft worker share a GPU, and each would take the "
            "memory that is free for its KV cache; set kv_cache_memory_bytes, or use placement 'colocated'"
        )
    if num_targets > 1:
        raise ConfigError(
            f"worker_resources {worker} lets {num_targets} target ranks share GPUs, which NCCL does not allow; use "
            "\"GPU\": 1, lower tensor_parallel_size, or let the draft share target rank 0's with placement 'colocated'"
        )


def cpus_needed(config: EngineConfig) -> float:
    """Return the least CPU count of a cluster for *config*."""
    num_workers = config.parallel.tensor_parallel_size + has_draft_worker(config)
    return ONE_CPU["CPU"] + num_workers * (config.parallel.worker_resources or ONE_CPU).get("CPU", 0.0)


@dataclass(frozen=True)
class PlacementTimeout:
    """How long to wait for room.

    Attributes:
        timeout_s: the limit.
        may_grow: whether nodes may still join the cluster; else a replica that cannot fit fails at once.
        is_wanted: called about once a second; waiting ends when it returns False.
    """

    timeout_s: float
    may_grow: bool = True
    is_wanted: Callable[[], bool] = lambda: True


class Placement:
    """A placement group whose bundles are all placed. Made by `place`.

    Attributes:
        nodes: the node id of each bundle.
    """

    def __init__(self, group: PlacementGroup, plan: BundleLayout) -> None:
        self.group, self.plan = group, plan
        table: dict[str, Any] = placement_group_table(group)
        self.nodes: list[str] = [table["bundles_to_node_id"][i] for i in range(len(plan.bundles))]

    def target_bundles(self) -> list[int]:
        """Return the target ranks' bundles; those that are placed on a living node now come first."""
        table: dict[str, Any] = placement_group_table(self.group)
        alive = {node["NodeID"] for node in ray_cluster.nodes()}
        bundles = range(1, 1 + self.plan.num_targets)
        return sorted(bundles, key=lambda bundle: table["bundles_to_node_id"].get(bundle) not in alive)

    def options(self, bundle: int, role: str) -> dict[str, Any]:
        """Return the options of an actor that takes all of *bundle*."""
        return {**actor_options(self.group, bundle, self.plan.bundles[bundle]), "name": self.name_of(role)}

    def name_of(self, role: str) -> str:
        """Return the Ray name of an actor of this replica, such as "slipstream 1f00ab5c draft"."""
        return f"slipstream {self.group.id.hex()[:8]} {role}"

    def remove(self) -> None:
        """Remove the placement group; actors still in it are killed."""
        remove_placement_group(self.group)


def actor_resources(resources: Resources) -> dict[str, Any]:
    """Return the options of an actor that takes *resources*."""
    custom = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
    return {"num_cpus": resources.get("CPU", 0.0), "num_gpus": resources.get("GPU", 0.0), "resources": custom}


def actor_options(group: PlacementGroup, bundle: int, resources: Resources) -> dict[str, Any]:
    """Return the options of an actor that takes all *resources* of one bundle, and is never restarted by Ray."""
    return {
        **actor_resources(resources),
        "max_restarts": 0,
        "max_task_retries": 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, bundle),
    }


def place(plan: BundleLayout, timeout: PlacementTimeout, report: ProgressCallback) -> Placement:
    """Wait until all bundles are placed; *report* is called with what is missing.

    Raises:
        PlacementError: there is no room, or the bundles are placed against the strategy.
    """
    group = placement_group(plan.bundles, strategy=plan.strategy)
    try:
        _wait(group, plan, timeout, report)
        placed = Placement(group, plan)
        check_nodes(placed.nodes, plan)
    except BaseException:
        remove_placement_group(group)
        raise
    report(describe(placed.nodes, plan))
    return placed


def _wait(group: PlacementGroup, plan: BundleLayout, timeout: PlacementTimeout, report: ProgressCallback) -> None:
    started = time.monotonic()
    report_at = started + FIRST_REPORT_S
    while not group.wait(POLL_S):
        now = time.monotonic()
        if now >= report_at:
            report_at = now + REPORT_EVERY_S
            report(f"waiting for room in the Ray cluster: {shortage(plan)}")
        if not timeout.may_grow and not fits(plan, [node["Resources"] for node in ray_cluster.nodes()]):
            raise PlacementError(f"{shortage(plan)}; {REMEDIES}")
        if now - started > timeout.timeout_s:
            limit = f"no room within {timeout.timeout_s:.0f} s (placement_timeout_s)"
            raise PlacementError(f"{shortage(plan)}: {limit}; {REMEDIES}")
        if not timeout.is_wanted():
            raise PlacementError("stopped while waiting for room in the Ray cluster")


def totals(bundles: Seq[Resources]) -> dict[str, float]:
    """Return the sum of each resource, GPUs first."""
    names = sorted({name for bundle in bundles for name in bundle}, key=lambda name: (name != "GPU", name))
    return {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in names}


def shortage(plan: BundleLayout) -> str:
    """Describe what is needed and what there is: "needs 3 GPUs and 4 CPUs on one node, the cluster has 2 GPUs ..."."""
    needed, nodes = totals(plan.bundles), [node["Resources"] for node in ray_cluster.nodes()]
    has, free = totals(nodes), ray_cluster.available_resources()
    together = " on one node" if plan.strategy == "STRICT_PACK" else ""
    there = _listed({name: has.get(name, 0.0) for name in needed})
    text = f"needs {_listed(needed)}{together}, the cluster has {there}"
    if together and len(nodes) > 1:
        best = {name: max((node.get(name, 0.0) for node in nodes), default=0.0) for name in needed}
        text += f" on {len(nodes)} nodes, at most {_listed(best)} on one"
    return f"{text} ({_listed({name: free.get(name, 0.0) for name in needed})} free)"


def fits(plan: BundleLayout, nodes: Seq[Resources]) -> bool:
    """Whether the totals of empty *nodes* cover those of the bundles; a necessary condition only."""
    needed = totals(plan.bundles)
    if plan.strategy != "STRICT_PACK":
        nodes = [totals(nodes)]
    return any(all(node.get(name, 0.0) >= amount for name, amount in needed.items()) for node in nodes)


def _listed(resources: Resources) -> str:
    parts = [f"{amount:g} {name}{'' if amount == 1 else 's'}" for name, amount in resources.items()]
    return ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else "".join(parts)


def check_nodes(nodes: Seq[str], plan: BundleLayout) -> None:
    """Check the placement against the strategy: Ray treats PACK and SPREAD as best effort.

    Raises:
        PlacementError: target ranks are on several nodes under PACK, or everything is on one node under SPREAD.
    """
    targets = set(nodes[1 : 1 + plan.num_targets])
    if plan.strategy == "PACK" and len(targets) > 1:
        raise PlacementError(
            f"the {plan.num_targets} target ranks were placed on {len(targets)} nodes, and with "
            "placement_strategy PACK they must share one; free devices on one node, or use SPREAD"
        )
    if plan.strategy == "SPREAD" and len(set(nodes)) == 1 and len(nodes) > 1:
        raise PlacementError(
            "placement_strategy is SPREAD, and everything was placed on one node; add nodes, or use STRICT_PACK or PACK"
        )


def describe(nodes: Seq[str], plan: BundleLayout) -> str:
    """Return which process is on which node, for messages."""
    names = ["controller", *(f"target rank {rank}" for rank in range(plan.num_targets)), *["draft"] * plan.has_draft]
    where: dict[str, list[str]] = {}
    for name, node in zip(names, nodes, strict=True):
        where.setdefault(node[:8], []).append(name)
    return "placed: " + "; ".join(f"{', '.join(those)} on node {node}" for node, those in where.items())
