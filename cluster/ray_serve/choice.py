"""Which replicas have a request's prefix and are not much busier than another: what a router decides, without Ray."""

from collections import deque
from collections.abc import Collection, Sequence

from cluster.ray_serve.affinity import PrefixOwners

SLACK = 8
"""A replica with the prefix may have this many more requests than the least loaded one."""
ENDED = 256
"""Completed requests remembered because `routed` may come later; for refused ones it never comes."""


class PrefixChoice:
    """The state of one router: the owners of prefixes, and the requests that it has sent. Replicas are named.

    Args:
        slack: see `SLACK`.
    """

    def __init__(self, slack: int = SLACK) -> None:
        self._slack = slack
        self._owners = PrefixOwners()
        self._running: dict[str, set[str]] = {}  # request ids by replica
        self._ended: deque[tuple[str, str]] = deque(maxlen=ENDED)  # requests, and replicas, completed before `routed`

    def preferred(self, keys: Sequence[str], among: Collection[str]) -> list[str]:
        """Return the owners of the longest known prefix *among* these replicas that are not too busy."""
        limit = min(map(self.load, among), default=0) + self._slack
        return [name for name in sorted(self._owners.of(keys, among)) if self.load(name) <= limit]

    def load(self, replica: str) -> int:
        """Return how many requests of this router a replica has."""
        return len(self._running.get(replica, ()))

    def routed(self, request_id: str, keys: Sequence[str], replica: str) -> None:
        """Record the replica of a request, and that it computes these prefixes."""
        self._owners.learn(keys, replica)
        if (request_id, replica) in self._ended:
            self._ended.remove((request_id, replica))
        else:
            self._running.setdefault(replica, set()).add(request_id)

    def completed(self, request_id: str, replica: str) -> None:
        """Remove a request. In a slow proxy this may be called before `routed`.

        It is also called for a replica that refused the request, which another one then gets. Where the same replica
        refuses it first and then takes it, the request is not counted.
        """
        running = self._running.get(replica, set())
        if request_id in running:
            running.remove(request_id)
        else:
            self._ended.append((request_id, replica))

    def keep(self, replicas: Collection[str]) -> None:
        """Forget all other replicas."""
        self._owners.keep(replicas)
        self._running = {name: running for name, running in self._running.items() if name in replicas}
