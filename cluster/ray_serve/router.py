"""Routes a request to the replica that has its prefix, unless that one is much busier than another."""

import random
from collections import deque
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

from cluster.ray_serve.affinity import PrefixOwners, keys_in

SLACK = 8
"""A replica with the prefix may have this many more requests than the least loaded one."""


ENDED = 256
"""Completed requests remembered because `on_request_routed` may come later; for refused ones it never comes."""


class PrefixRouter(LocalityMixin, MultiplexMixin, RequestRouter):
    """One per proxy of Ray Serve; each sees only the requests of its own proxy.

    The session id holds digests of prefixes, see `cluster.ray_serve.affinity`. Without a match, the less loaded of two
    random replicas is chosen.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Read the deployment's `request_router_kwargs`: `slack`."""
        self._slack = int(kwargs.pop("slack", SLACK))
        super().initialize_state(**kwargs)  # type: ignore[no-untyped-call]
        self._owners = PrefixOwners()
        self._running: dict[str, set[str]] = {}  # request ids by replica
        self._ended: deque[str] = deque(maxlen=ENDED)  # completed before `on_request_routed`

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return replicas in ranks: a rank is tried if no replica of the rank above accepts the request."""
        near = self.apply_locality_routing(pending_request=pending_request)
        others = [replica for replica in candidate_replicas if replica.replica_id in near]
        two = random.sample(others, min(2, len(others)))
        return [self._preferred(candidate_replicas, pending_request), two]

    def _preferred(self, candidates: list[RunningReplica], request: PendingRequest | None) -> list[RunningReplica]:
        keys = [] if request is None else keys_in(request.metadata.session_id)
        named = {replica.replica_id.unique_id: replica for replica in candidates}
        limit = min(map(self._load, named), default=0) + self._slack
        return [named[name] for name in sorted(self._owners.of(keys, named.keys())) if self._load(name) <= limit]

    def _load(self, replica: str) -> int:
        return len(self._running.get(replica, ()))

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Record the replica of the request and its prefixes."""
        super().on_request_routed(pending_request, replica_id, result)
        self._owners.learn(keys_in(pending_request.metadata.session_id), replica_id.unique_id)
        request_id = pending_request.metadata.internal_request_id
        if request_id in self._ended:
            self._ended.remove(request_id)
        else:
            self._running.setdefault(replica_id.unique_id, set()).add(request_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Remove the request. In a slow proxy this may be called before `on_request_routed`."""
        super().on_request_completed(replica_id, internal_request_id)
        running = self._running.get(replica_id.unique_id, set())
        if internal_request_id in running:
            running.remove(internal_request_id)
        else:
            self._ended.append(internal_request_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forget removed replicas."""
        super().update_replicas(replicas)
        left = {replica.replica_id.unique_id for replica in replicas}
        self._owners.keep(left)
        self._running = {name: running for name, running in self._running.items() if name in left}


def routing() -> dict[str, Any]:
    """Return the deployment options that select this router.

    Empty under HAProxy, which chooses replicas itself: Serve rejects router options there.
    """
    if constants.RAY_SERVE_ENABLE_HA_PROXY:
        return {}
    name = f"{__name__}.{PrefixRouter.__name__}"
    return {"request_router_config": RequestRouterConfig.model_validate({"request_router_class": name})}
