"""Where an engine's parts stand: in a placement group of their own, or in that of the Serve replica they belong to."""

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


class Site(Protocol):
    """A place for one engine. `take` and `give_back` once each; either may be called from any thread."""

    def take(self, config: EngineConfig, say: ProgressCallback, is_wanted: IsWanted) -> Placement:
        """Return where the engine's parts go, having waited for room; *say* is told of that.

        Raises:
            PlacementError: there is no room, or *is_wanted* said no meanwhile.
        """
        ...

    def give_back(self) -> None:
        """Free the place; whatever still runs there is ended. Harmless where nothing was taken."""
        ...


class OwnSite:
    """A placement group of the engine's own, in the cluster that RAY_ADDRESS names, or in one started here."""

    def __init__(self) -> None:
        self._membership: Membership | None = None
        self._placement: Placement | None = None

    def take(self, config: EngineConfig, say: ProgressCallback, is_wanted: IsWanted) -> Placement:
        """See `Site`."""
        say(ray_cluster.way_in())
        self._membership = member = Membership(cpus_needed(config))
        plan = layout(config, ray_cluster.cluster_resources())
        patience = PlacementTimeout(
            config.parallel.placement_timeout_s, may_grow=not member.is_local, is_wanted=is_wanted
        )
        self._placement = place(plan, patience, say)
        return self._placement

    def give_back(self) -> None:
        """See `Site`."""
        if self._placement is not None and ray.is_initialized():
            self._placement.remove()
        if self._membership is not None:
            self._membership.leave()


class ReplicaSite:
    """The placement group of the Serve replica that this process is: Serve made it, and takes it back itself."""

    def take(self, config: EngineConfig, say: ProgressCallback, is_wanted: IsWanted) -> Placement:
        """See `Site`. There is no waiting: the replica runs because all of its bundles are in place."""
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
        say(describe(placed.nodes, plan))
        return placed

    def give_back(self) -> None:
        """See `Site`."""


def replica_bundles(plan: BundleLayout, replica: Mapping[str, float]) -> list[dict[str, float]]:
    """Return the bundles of a Serve replica: those of *plan*, the controller's also holding the *replica* itself."""
    first, *workers = plan.bundles
    shared = {name: first.get(name, 0.0) + replica.get(name, 0.0) for name in {**first, **replica}}
    return [shared, *workers]


def check_room(bundles: Seq[Mapping[str, float]], plan: BundleLayout) -> None:
    """Refuse bundles, given by hand in a Serve config, that the engine does not fit in.

    Raises:
        PlacementError: names the bundle and what it lacks.
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
