"""Provides an engine's placement: in a placement group of its own, or in that of its Serve replica."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Protocol

import ray
from ray.util.placement_group import get_current_placement_group

from cluster.ray import cluster as ray_cluster
from cluster.ray.cluster import Membership
from cluster.ray.placement import (
    CONTROLLER,
    BundleLayout,
    Placement,
    PlacementTimeout,
    check_nodes,
    cpus_needed,
    describe,
    layout,
    place,
)
from protos.config.engine import EngineConfig
from protos.errors import PlacementError
from protos.progress import ProgressCallback

IsWanted = Callable[[], bool]


class PlacementProvider(Protocol):
    """Provides the placement of one engine. `acquire` and `release` are called once each, from any thread."""

    def acquire(self, config: EngineConfig, report: ProgressCallback, is_wanted: IsWanted) -> Placement:
        """Wait for room and return the placement; *report* is called with lines of progress.

        Raises:
            PlacementError: there is no room, or *is_wanted* returned False.
        """
        ...

    def release(self) -> None:
        """Release the placement; actors still in it are killed. Does nothing if there is none."""
        ...


class OwnPlacementGroup:
    """A placement group of the engine's own, in the cluster at RAY_ADDRESS or in one started here."""

    def __init__(self) -> None:
        self._membership: Membership | None = None
        self._placement: Placement | None = None

    def acquire(self, config: EngineConfig, report: ProgressCallback, is_wanted: IsWanted) -> Placement:
        """See `PlacementProvider`."""
        report(ray_cluster.describe_connection())
        self._membership = member = Membership(cpus_needed(config))
        plan = layout(config, ray_cluster.cluster_resources())
        timeout = PlacementTimeout(
            config.parallel.placement_timeout_s, may_grow=not member.is_local, is_wanted=is_wanted
        )
        self._placement = place(plan, timeout, report)
        return self._placement

    def release(self) -> None:
        """See `PlacementProvider`."""
        if self._placement is not None and ray.is_initialized():
            self._placement.remove()
        if self._membership is not None:
            self._membership.leave()


class ReplicaPlacementGroup:
    """The placement group of the Serve replica in this process. Serve creates and removes it."""

    def acquire(self, config: EngineConfig, report: ProgressCallback, is_wanted: IsWanted) -> Placement:
        """See `PlacementProvider`. Does not wait: a replica runs only once all of its bundles are placed."""
        del is_wanted
        group = get_current_placement_group()
        if group is None:
            raise PlacementError(
                "this replica has no placement group: leave placement_group_bundles as build_app makes them"
            )
        plan = layout(config, ray_cluster.cluster_resources())
        check_room(group.bundle_specs, plan)
        placed = Placement(group, plan)
        check_nodes(placed.nodes, plan)
        report(describe(placed.nodes, plan))
        return placed

    def release(self) -> None:
        """See `PlacementProvider`."""


def replica_bundles(plan: BundleLayout, replica: Mapping[str, float]) -> list[dict[str, float]]:
    """Return the bundles of a Serve replica: those of *plan*, the *replica*'s own resources added to the first."""
    first, *workers = plan.bundles
    shared = {name: first.get(name, 0.0) + replica.get(name, 0.0) for name in {**first, **replica}}
    return [shared, *workers]


def check_room(bundles: Seq[Mapping[str, float]], plan: BundleLayout) -> None:
    """Check that the engine fits in *bundles*, which a Serve config may override.

    Raises:
        PlacementError: names the bundle and the missing resource.
    """
    if len(bundles) != len(plan.bundles):
        raise PlacementError(
            f"the replica's placement group has {len(bundles)} bundles, the engine needs "
            f"{len(plan.bundles)}: one for the replica and its controller, and one a worker"
        )
    for index, (has, needs) in enumerate(zip(bundles, plan.bundles, strict=True)):
        for name, amount in needs.items():
            if has.get(name, 0.0) < amount:
                what = "the controller" if index == CONTROLLER else "a worker"
                raise PlacementError(
                    f"bundle {index} of the replica's placement group has {has.get(name, 0.0):g} "
                    f"{name}, {what} needs {amount:g}"
                )
