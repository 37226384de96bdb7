"""What one replica on Ray Serve holds, and how Serve is to treat it.

A replica's placement group is its engine's whole gang, so that Serve places, ends and replaces it as one:

    bundle 0            the replica, and its controller
    bundles 1 .. T      the target ranks
    bundle T + 1        the draft, where it has a worker of its own

An engine in one process (`uni`) has bundle 0 only, with its device in it.
"""

from dataclasses import replace
from typing import Any

import ray
from ray import serve

from cluster.ray import cluster as ray_cluster
from cluster.ray.placement import ONE_CPU, BundleLayout, actor_resources, layout
from cluster.ray.placement_provider import replica_bundles
from cluster.ray_serve.arguments import ServerArguments
from cluster.ray_serve.router import routing
from protos.config.engine import EngineConfig
from protos.errors import ConfigError

NAME = "Slipstream"
"""By which a Serve config sets the number of replicas and other options."""
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 3.0, 30.0
"""The check only reads what is known, so it is late only where the whole process is."""
QUEUED = 256
"""Requests that a proxy holds while all replicas are full; more are refused, as `backpressure_config` says."""
OTHERS = 64
"""Requests of a replica that are for no tokens."""


def planned(config: EngineConfig) -> tuple[BundleLayout, EngineConfig]:
    """Return what a replica needs, and *config* with that written down, so that replicas need not find out again.

    A cluster that grows from nothing shows no GPU yet: `device: cuda` says that there will be some.

    Raises:
        ConfigError: nobody said on which device, and there is no cluster to ask yet.
    """
    if config.model.device == "auto" and not ray.is_initialized():
        raise ConfigError(
            "device must be cpu or cuda here: `serve run` builds the application before it joins Ray, "
            "so that there is nobody to ask for GPUs"
        )
    resources = {"cuda": {"GPU": 1.0}, "cpu": {}}.get(config.model.device)
    plan = layout(config, ray_cluster.cluster_resources() if resources is None else resources)
    device = config.model.device if "GPU" in plan.worker else "cpu"
    return plan, replace(
        config,
        parallel=replace(config.parallel, worker_resources=plan.worker),
        model=replace(config.model, device=device),
    )


def bundles(plan: BundleLayout, config: EngineConfig) -> list[dict[str, float]]:
    """Return the bundles of a replica; the first is the replica's own."""
    if config.parallel.executor == "uni":
        return [{**ONE_CPU, **plan.worker}]
    return replica_bundles(plan, ONE_CPU)


def deployed(ingress: type, plan: BundleLayout, config: EngineConfig, settings: ServerArguments) -> serve.Deployment:
    """Return the deployment of *ingress*. A Serve config may override what is set here."""
    places = bundles(plan, config)
    own = places[0] if config.parallel.executor == "uni" else ONE_CPU
    options: dict[str, Any] = {
        "ray_actor_options": actor_resources(own),
        "placement_group_bundles": places,
        "placement_group_strategy": plan.strategy,
        # The engine's own queue turns requests away, at once and by what they weigh; others, such as those for the
        # health, must pass.
        "max_ongoing_requests": config.scheduler.max_num_seqs + settings.max_waiting_requests + OTHERS,
        "max_queued_requests": QUEUED,
        "graceful_shutdown_timeout_s": settings.drain_s,
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        **routing(),
    }
    made: serve.Deployment = serve.deployment(name=NAME, **options)(ingress)
    return made
