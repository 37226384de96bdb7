"""The simulated fleet: nothing is lost, and one replica waits as queueing theory says."""

import pytest

from benchmarks.fleet.costs import ReplicaCosts
from benchmarks.fleet.replica import ReplicaLimits
from benchmarks.fleet.routers import ROUTERS, make_router
from benchmarks.fleet.simulation import UNDISTURBED, Disturbance, FleetResult, FleetSimulation
from benchmarks.fleet.trace import Load

COSTS = ReplicaCosts({1: 0.01, 64: 0.02, 256: 0.05}, {1: 0.001, 16: 0.002}, acceptance=0.7)
LOAD = Load(rate=12.0, count=300, sessions=24)


def simulated(
    router: str, *, k: int = 4, number: int = 6, load: Load = LOAD, disturbance: Disturbance = UNDISTURBED
) -> FleetResult:
    fleet = FleetSimulation(number, make_router(router, 1, 2), COSTS, ReplicaLimits(k=k), disturbance=disturbance)
    return fleet.run(load.make())


DISTURBED = [
    UNDISTURBED,
    Disturbance(loss_at=8.0, lost_share=0.5, restart_s=3.0),
    Disturbance(update_at=5.0, restart_s=1.0),
]


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("disturbance", DISTURBED)
def test_every_request_ends_once_and_after_its_first_token(router: str, disturbance: Disturbance) -> None:
    result = simulated(router, disturbance=disturbance)
    assert len(result.requests) == LOAD.count
    for request in result.requests:
        assert request.first is not None
        assert request.ended is not None
        assert request.arrives < request.first <= request.ended
        assert 0 <= request.cached < request.prompt
    assert (result.retried > 0) == (disturbance.loss_at is not None)


@pytest.mark.parametrize("disturbance", DISTURBED)
def test_littles_law(disturbance: Disturbance) -> None:
    result = simulated("prefix", disturbance=disturbance)
    inside_s = sum((request.ended or 0.0) - request.arrives for request in result.requests)
    assert result.area_s == pytest.approx(inside_s)


def test_the_same_seed_gives_the_same_fleet() -> None:
    assert simulated("prefix").requests == simulated("prefix").requests


def test_requests_go_where_their_prefix_is() -> None:
    hits = {router: simulated(router).hit_share for router in ROUTERS}
    assert hits["prefix"] > 1.3 * max(hits["round robin"], hits["power of two"])


def test_speculation_needs_fewer_steps() -> None:
    assert simulated("prefix").steps < 0.7 * simulated("prefix", k=0).steps


def test_one_replica_with_one_seat_waits_as_an_md1_queue() -> None:
    """Pollaczek and Khinchine: the wait before service is rho D / (2 (1 - rho))."""
    costs = ReplicaCosts({1: 0.1, 64: 0.1}, {1: 0.0})
    for rho in (0.3, 0.6):
        load = Load(rate=rho / 0.1, count=20_000, sessions=1, prefix=0, suffix=32, output=1)
        fleet = FleetSimulation(1, make_router("round robin", 0, 1), costs, ReplicaLimits(max_seqs=1))
        requests = load.make()
        for request in requests:
            request.output = 1
        result = fleet.run(requests)
        assert result.waits_N.mean() - 0.1 == pytest.approx(rho * 0.1 / (2 * (1 - rho)), rel=0.08)
