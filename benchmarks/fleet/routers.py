"""Routers of a fleet. That by prefix is the one of Ray Serve's proxies, without Ray."""

import random
from collections.abc import Mapping, Sequence
from typing import Protocol

from benchmarks.fleet.trace import FleetRequest
from cluster.ray_serve.choice import PrefixChoice


class HasLoad(Protocol):
    """A replica, as routers see it."""

    @property
    def load(self) -> int: ...


class Router(Protocol):
    """Chooses replicas."""

    def choose(self, request: FleetRequest, replicas: Mapping[str, HasLoad]) -> str:
        """Return one of *replicas*, all of which accept requests."""
        ...

    def ended(self, request: FleetRequest, replica: str) -> None:
        """Note that a request has left its replica, whether it ended or the replica did."""
        ...


class RoundRobin:
    """One replica after another."""

    def __init__(self) -> None:
        self._count = 0

    def choose(self, request: FleetRequest, replicas: Mapping[str, HasLoad]) -> str:
        """See `Router`."""
        self._count += 1
        return list(replicas)[self._count % len(replicas)]

    def ended(self, request: FleetRequest, replica: str) -> None:
        """See `Router`."""


class PowerOfTwo:
    """The less loaded of two random replicas, as Ray Serve does by itself."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice

    def choose(self, request: FleetRequest, replicas: Mapping[str, HasLoad]) -> str:
        """See `Router`."""
        two = self._dice.sample(list(replicas), min(2, len(replicas)))
        return min(two, key=lambda name: replicas[name].load)

    def ended(self, request: FleetRequest, replica: str) -> None:
        """See `Router`."""


class ByPrefix:
    """`cluster.ray_serve.router.PrefixRouter`: proxies that each know only their own requests, in turn.

    Args:
        dice: for requests without an owner.
        num_proxies: proxies of Ray Serve.
    """

    def __init__(self, dice: random.Random, num_proxies: int) -> None:
        self._proxies = [PrefixChoice() for _ in range(num_proxies)]
        self._others = PowerOfTwo(dice)
        self._of: dict[str, PrefixChoice] = {}
        self._known: frozenset[str] = frozenset()
        self._count = 0

    def choose(self, request: FleetRequest, replicas: Mapping[str, HasLoad]) -> str:
        """See `Router`."""
        if replicas.keys() != self._known:
            self._known = frozenset(replicas)
            for proxy in self._proxies:
                proxy.keep(self._known)
        self._count += 1
        choice = self._of[request.name] = self._proxies[self._count % len(self._proxies)]
        preferred = choice.preferred(request.keys, replicas.keys())
        chosen = min(preferred, key=lambda name: replicas[name].load, default=None)
        chosen = self._others.choose(request, replicas) if chosen is None else chosen
        choice.routed(request.name, request.keys, chosen)
        return chosen

    def ended(self, request: FleetRequest, replica: str) -> None:
        """See `Router`."""
        self._of.pop(request.name).completed(request.name, replica)


ROUTERS: Sequence[str] = ("prefix", "power of two", "round robin")


def make_router(name: str, seed: int, num_proxies: int) -> Router:
    """Return the router of one of `ROUTERS`."""
    dice = random.Random(seed)
    if name == "prefix":
        return ByPrefix(dice, num_proxies)
    return RoundRobin() if name == "round robin" else PowerOfTwo(dice)
