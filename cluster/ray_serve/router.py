"""Routes a request to the replica that has its prefix, unless that one is much busier than another."""

import random
from collections.abc import Sequence
from typing import Any

from ray.serve._private import constants
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import (
    LocalityMixin,
    MultiplexMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from cluster.ray_serve.affinity import keys_in
from cluster.ray_serve.choice import SLACK, PrefixChoice
from cluster.ray_serve.refusals import leave_out_refusals

READY = "ready"
"""What replicas report to routers: whether they run requests now."""
REPORT_PERIOD_S = 1.0


def reported(is_ready: bool) -> dict[str, Any]:
    """Return what a replica reports to routers."""
    return {READY: is_ready}


def ready(replicas: Sequence[RunningReplica]) -> list[RunningReplica]:
    """Return the *replicas* that did not report that they run no requests; all, if each of them did."""
    return [replica for replica in replicas if replica.routing_stats.get(READY, True)] or list(replicas)


class PrefixRouter(LocalityMixin, MultiplexMixin, RequestRouter):
    """One per proxy of Ray Serve; each sees only the requests of its own proxy.

    The session id holds digests of prefixes, see `cluster.ray_serve.affinity`. Without a match, the less loaded of two
    random replicas is chosen. A replica whose target group is lost gets no requests while another has one.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Read the deployment's `request_router_kwargs`: `slack`."""
        leave_out_refusals()
        self._choice = PrefixChoice(int(kwargs.pop("slack", SLACK)))
        super().initialize_state(**kwargs)  # type: ignore[no-untyped-call]

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return replicas in ranks: a rank is tried if no replica of the rank above accepts the request."""
        near = self.apply_locality_routing(pending_request=pending_request)
        candidates = ready(candidate_replicas)
        others = [replica for replica in candidates if replica.replica_id in near] or candidates
        two = random.sample(others, min(2, len(others)))
        keys = [] if pending_request is None else keys_in(pending_request.metadata.session_id)
        named = {replica.replica_id.unique_id: replica for replica in candidates}
        return [[named[name] for name in self._choice.preferred(keys, named.keys())], two]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Record the replica of the request and its prefixes."""
        super().on_request_routed(pending_request, replica_id, result)
        metadata = pending_request.metadata
        self._choice.routed(metadata.internal_request_id, keys_in(metadata.session_id), replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Remove the request."""
        super().on_request_completed(replica_id, internal_request_id)
        self._choice.completed(internal_request_id, replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forget removed replicas."""
        super().update_replicas(replicas)
        self._choice.keep({replica.replica_id.unique_id for replica in replicas})


def routing() -> dict[str, Any]:
    """Return the deployment options that select this router.

    Empty under HAProxy, which chooses replicas itself: Serve rejects router options there.
    """
    if constants.RAY_SERVE_ENABLE_HA_PROXY:
        return {}
    options = {
        "request_router_class": f"{__name__}.{PrefixRouter.__name__}",
        "request_routing_stats_period_s": REPORT_PERIOD_S,
    }
    return {"request_router_config": RequestRouterConfig.model_validate(options)}
