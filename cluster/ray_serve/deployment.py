"""The Serve deployment of a replica: its bundles and its options.

A replica's placement group holds its engine's whole worker group, so that Serve places, ends and replaces it as one:

    bundle 0            the replica, and its controller
    bundles 1 .. T      the target ranks
    bundle T + 1        the draft, if it has a worker of its own

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
"""The deployment's name in a Serve config."""
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 3.0, 30.0
"""The check only reads known state, so it is late only if the whole process is."""
MAX_QUEUED = 256
"""Requests that a proxy queues while all replicas are full; more are rejected."""
OTHER_REQUESTS = 64
"""Concurrent requests of a replica that generate no tokens, such as health checks."""


def planned(config: EngineConfig) -> tuple[BundleLayout, EngineConfig]:
    """Return a replica's bundles, and *config* with the device and worker resources set accordingly.

    An autoscaling cluster may have no GPU yet: `device: cuda` requests them anyway.

    Raises:
        ConfigError: device is auto, and Ray is not initialized.
    """
    if config.model.device == "auto" and not ray.is_initialized():
        raise ConfigError(
            "device must be cpu or cuda here: `serve run` builds the application before it joins Ray, "
            "so the cluster's GPUs are unknown"
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
    """Return the bundles of a replica; the first one holds the replica itself."""
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
        # The engine's own queue rejects requests at once and by size; other requests, such as health checks, must pass.
        "max_ongoing_requests": config.scheduler.max_num_seqs + settings.max_waiting_requests + OTHER_REQUESTS,
        "max_queued_requests": MAX_QUEUED,
        "graceful_shutdown_timeout_s": settings.drain_s,
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        **routing(),
    }
    made: serve.Deployment = serve.deployment(name=NAME, **options)(ingress)
    return made
