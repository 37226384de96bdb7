"""Simulates a fleet, event by event: arrivals, steps of replicas, losses and rolling updates."""

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from benchmarks.fleet.costs import ReplicaCosts
from benchmarks.fleet.replica import ReplicaLimits, SimulatedReplica
from benchmarks.fleet.routers import Router
from benchmarks.fleet.trace import FleetRequest


@dataclass(frozen=True)
class Disturbance:
    """What happens to replicas meanwhile.

    Attributes:
        loss_at: when replicas are lost at once, in seconds; None: never.
        lost_share: of the replicas, at least one.
        update_at: when a rolling update begins; None: never. As many replicas at once as Ray Serve replaces, a fifth.
        restart_s: seconds until a lost or updated replica serves again.
    """

    loss_at: float | None = None
    lost_share: float = 0.1
    update_at: float | None = None
    restart_s: float = 30.0


UNDISTURBED = Disturbance()


@dataclass
class FleetResult:
    """What became of all requests.

    Attributes:
        requests: all of them, ended.
        steps: of all replicas.
        area_s: the sum over time of the number of requests in the fleet.
    """

    requests: Sequence[FleetRequest]
    steps: int = 0
    area_s: float = 0.0
    waits_N: "np.ndarray[tuple[int], np.dtype[np.float64]]" = field(init=False)

    def __post_init__(self) -> None:
        self.waits_N = np.array([request.wait_s for request in self.requests])

    @property
    def seconds(self) -> float:
        """From the first arrival to the last end."""
        return max(request.ended or 0.0 for request in self.requests) - self.requests[0].arrives

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second."""
        return sum(request.output for request in self.requests) / self.seconds

    def wait_s(self, percent: float) -> float:
        """Return a percentile of the seconds to the first token."""
        return float(np.percentile(self.waits_N, percent))

    @property
    def hit_share(self) -> float:
        """Prompt tokens that a prefix cache held, of all."""
        return sum(request.cached for request in self.requests) / sum(request.prompt for request in self.requests)

    @property
    def retried(self) -> int:
        """Requests that were sent again because their replica was lost."""
        return sum(request.tries > 1 for request in self.requests)


class FleetSimulation:
    """A fleet of equal replicas behind a router.

    Args:
        num_replicas: at the beginning.
        router: chooses among those that accept requests.
        costs, limits: of every replica.
        disturbance: what happens meanwhile.
        seed: of what is accepted, and of which replicas are lost.
    """

    def __init__(
        self,
        num_replicas: int,
        router: Router,
        costs: ReplicaCosts,
        limits: ReplicaLimits,
        *,
        disturbance: Disturbance = UNDISTURBED,
        seed: int = 0,
    ) -> None:
        self._router, self._costs, self._limits = router, costs, limits
        self._disturbance = disturbance
        self._dice = random.Random(seed)
        self._names = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._open: dict[str, SimulatedReplica] = {}
        self._all: list[SimulatedReplica] = []
        self._homeless: deque[FleetRequest] = deque()  # while no replica accepts requests
        self._old: deque[SimulatedReplica] = deque()  # to be updated
        self._updating: list[SimulatedReplica] = []  # that end what they have
        self._now, self._inside, self._area_s = 0.0, 0, 0.0
        for _ in range(num_replicas):
            self._add()

    def run(self, requests: Sequence[FleetRequest]) -> FleetResult:
        """Run until all requests have ended."""
        for request in requests:
            self._at(request.arrives, lambda request=request: self._arrive(request))  # type: ignore[misc]
        if self._disturbance.loss_at is not None:
            self._at(self._disturbance.loss_at, self._lose)
        if self._disturbance.update_at is not None:
            self._at(self._disturbance.update_at, self._update)
        while self._events:
            at, _, act = heapq.heappop(self._events)
            self._area_s += (at - self._now) * self._inside
            self._now = at
            act()
        assert not self._homeless and not self._inside, "a request was forgotten"
        return FleetResult(requests, sum(replica.steps for replica in self._all), self._area_s)

    def _at(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (seconds, next(self._order), act))

    def _add(self) -> None:
        replica = SimulatedReplica(f"replica-{next(self._names)}", self._costs, self._limits, self._dice)
        self._open[replica.name] = replica
        self._all.append(replica)
        while self._homeless:
            self._send(self._homeless.popleft())

    def _arrive(self, request: FleetRequest) -> None:
        self._inside += 1
        self._send(request)

    def _send(self, request: FleetRequest) -> None:
        if not self._open:
            self._homeless.append(request)
            return
        request.tries += 1
        request.replica = self._router.choose(request, self._open)
        replica = self._open[request.replica]
        replica.waiting.append(request)
        if not replica.is_busy:
            self._begin(replica)

    def _begin(self, replica: SimulatedReplica) -> None:
        replica.is_busy = True
        self._at(self._now + replica.begin(), lambda: self._end(replica))

    def _end(self, replica: SimulatedReplica) -> None:
        for request in replica.end(self._now):
            self._inside -= 1
            self._router.ended(request, replica.name)
        if replica.load:
            self._begin(replica)
            return
        replica.is_busy = False
        if replica in self._updating:
            self._restart(replica)

    # Losses.

    def _lose(self) -> None:
        number = max(1, round(self._disturbance.lost_share * len(self._open)))
        for name in self._dice.sample(sorted(self._open), number):
            replica = self._open.pop(name)
            lost = replica.lose()
            self._at(self._now + self._disturbance.restart_s, self._add)
            for request in lost:
                self._router.ended(request, name)
                self._send(request)

    # Rolling updates: replicas end what they have, and are replaced by new ones with empty caches.

    def _update(self) -> None:
        self._old = deque(self._open.values())
        for _ in range(max(1, len(self._open) // 5)):
            self._drain_next()

    def _drain_next(self) -> None:
        while self._old:
            replica = self._old.popleft()
            if self._open.pop(replica.name, None) is not None:  # else it was lost meanwhile
                self._updating.append(replica)
                if not replica.is_busy:
                    self._restart(replica)
                return

    def _restart(self, replica: SimulatedReplica) -> None:
        self._updating.remove(replica)
        self._at(self._now + self._disturbance.restart_s, self._updated)

    def _updated(self) -> None:
        self._add()
        self._drain_next()
