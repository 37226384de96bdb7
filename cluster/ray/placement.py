"""One placement group for each replica: a bundle for the controller, one for each target rank, one for the draft."""

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.ray import cluster as ray_cluster
from protos.config.engine import EngineConfig
from protos.errors import PlacementError
from protos.progress import ProgressCallback
from protos.worker_messages import WorkerId
from runtime.supervision.draft_supervisor import has_draft_worker

Resources = Mapping[str, float]

CONTROLLER = 0
POLL_S = 1
"""Whole seconds: Ray cuts off fractions, and would be asked again and again without a pause."""
FIRST_WORD_S = 2.0
SAY_EVERY_S = 30.0
BARE = {"CPU": 1.0}
WAYS_OUT = (
    "add devices or nodes, lower tensor_parallel_size, put the draft beside the target (placement: colocated), "
    "or say with worker_resources what a worker may ask for"
)


@dataclass(frozen=True)
class BundleLayout:
    """Which bundles a replica needs, and how near to each other.

    Attributes:
        worker: what each worker's bundle holds.
    """

    num_targets: int
    has_draft: bool
    worker: dict[str, float]
    strategy: str

    @property
    def bundles(self) -> list[dict[str, float]]:
        """The controller's, the target ranks' in order, and the draft's."""
        return [BARE, *[self.worker] * (self.num_targets + self.has_draft)]

    def bundle_of(self, worker: WorkerId) -> int:
        """Return the bundle that is *worker*'s, in whatever incarnation."""
        return 1 + (worker.rank if worker.role == "target" else self.num_targets)


def layout(config: EngineConfig, cluster: Resources) -> BundleLayout:
    """Return what *config* needs; each worker asks for a GPU where *cluster*, by its totals, has any and may be used.

    Raises:
        PlacementError: CUDA is asked for, and there is no GPU; or workers would take GPUs that they did not ask for.
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
                f"worker_resources {worker} has no GPU: workers would take GPUs that Ray may give to "
                "others; add \"GPU\": 1, or use device='cpu'"
            )
    else:
        worker = {**BARE, "GPU": 1.0} if has_gpus and config.model.device != "cpu" else dict(BARE)
    return BundleLayout(parallel.tensor_parallel_size, has_draft_worker(config), worker, parallel.placement_strategy)


def cpus_needed(config: EngineConfig) -> float:
    """Return how many CPUs a cluster must count at least to hold *config*."""
    num_workers = config.parallel.tensor_parallel_size + has_draft_worker(config)
    return BARE["CPU"] + num_workers * (config.parallel.worker_resources or BARE).get("CPU", 0.0)


@dataclass(frozen=True)
class PlacementTimeout:
    """How long to wait for room.

    Attributes:
        timeout_s: the most.
        may_grow: whether nodes may still join the cluster; else there is no waiting for what it never had.
        is_wanted: asked now and then; once it says no, waiting ends.
    """

    timeout_s: float
    may_grow: bool = True
    is_wanted: Callable[[], bool] = lambda: True


class Placement:
    """A placement group whose bundles are all in place. Made by `place`.

    Attributes:
        nodes: the node id of each bundle.
    """

    def __init__(self, group: PlacementGroup, plan: BundleLayout) -> None:
        self.group, self.plan = group, plan
        table: dict[str, Any] = placement_group_table(group)
        self.nodes: list[str] = [table["bundles_to_node_id"][i] for i in range(len(plan.bundles))]

    def options(self, bundle: int, who: str) -> dict[str, Any]:
        """Return the options of an actor that fills *bundle*."""
        return {**actor_options(self.group, bundle, self.plan.bundles[bundle]), "name": self.name_of(who)}

    def name_of(self, who: str) -> str:
        """Return the name Ray knows an actor of this replica by, such as "slipstream 1f00ab5c draft"."""
        return f"slipstream {self.group.id.hex()[:8]} {who}"

    def remove(self) -> None:
        """Give the bundles back; whatever still runs in them is ended."""
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


def place(plan: BundleLayout, patience: PlacementTimeout, say: ProgressCallback) -> Placement:
    """Wait until the cluster has room for all bundles; *say* is told what is waited for.

    Raises:
        PlacementError: there is no room, or the bundles are not as near to each other as they must be.
    """
    group = placement_group(plan.bundles, strategy=plan.strategy)
    try:
        _wait(group, plan, patience, say)
        placed = Placement(group, plan)
        check_nodes(placed.nodes, plan)
    except BaseException:
        remove_placement_group(group)
        raise
    say(describe(placed.nodes, plan))
    return placed


def _wait(group: PlacementGroup, plan: BundleLayout, patience: PlacementTimeout, say: ProgressCallback) -> None:
    started = time.monotonic()
    say_at = started + FIRST_WORD_S
    while not group.wait(POLL_S):
        now = time.monotonic()
        if now >= say_at:
            say_at = now + SAY_EVERY_S
            say(f"waiting for room in the Ray cluster: {shortage(plan)}")
        if not patience.may_grow and not fits(plan, [node["Resources"] for node in ray_cluster.nodes()]):
            raise PlacementError(f"{shortage(plan)}; {WAYS_OUT}")
        if now - started > patience.timeout_s:
            limit = f"no room within {patience.timeout_s:.0f} s (placement_timeout_s)"
            raise PlacementError(f"{shortage(plan)}: {limit}; {WAYS_OUT}")
        if not patience.is_wanted():
            raise PlacementError("told to stop while waiting for room in the Ray cluster")


def totals(bundles: Seq[Resources]) -> dict[str, float]:
    """Return the sums by resource, GPUs first."""
    names = sorted({name for bundle in bundles for name in bundle}, key=lambda name: (name != "GPU", name))
    return {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in names}


def shortage(plan: BundleLayout) -> str:
    """Say what is needed and what there is: "needs 3 GPUs and 4 CPUs on one node, the cluster has 2 GPUs ..."."""
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
    """Whether empty *nodes* could hold the bundles by their sums; that they can be divided so is not promised."""
    needed = totals(plan.bundles)
    if plan.strategy != "STRICT_PACK":
        nodes = [totals(nodes)]
    return any(all(node.get(name, 0.0) >= amount for name, amount in needed.items()) for node in nodes)


def _listed(resources: Resources) -> str:
    parts = [f"{amount:g} {name}{'' if amount == 1 else 's'}" for name, amount in resources.items()]
    return ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else "".join(parts)


def check_nodes(nodes: Seq[str], plan: BundleLayout) -> None:
    """Hold Ray to what was asked for: PACK and SPREAD are best effort to it.

    Raises:
        PlacementError: target ranks were parted under PACK, or everything is on one node under SPREAD.
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
    """Say who is where, by the beginnings of node ids."""
    names = ["controller", *(f"target rank {rank}" for rank in range(plan.num_targets)), *["draft"] * plan.has_draft]
    where: dict[str, list[str]] = {}
    for name, node in zip(names, nodes, strict=True):
        where.setdefault(node[:8], []).append(name)
    return "placed: " + "; ".join(f"{', '.join(those)} on node {node}" for node, those in where.items())
