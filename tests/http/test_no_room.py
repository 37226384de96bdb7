"""A server whose target group is lost, and for which the cluster has no room for a while."""

import time
from collections.abc import Iterator

import httpx
import pytest

from protos.errors import NoRoomError, TargetLostError
from protos.messages import RoundPlan, Verdict, WorkerInfo
from tests.support.processes import wait_until
from tests.support.serving.fake_engine import HashExecutor, expected, local_engine
from tests.support.serving.grpc_checks import NOT_SERVING, SERVING, Code, checked, failure
from tests.support.serving.grpc_server import SERVICE, Served, request, serving

RANK = "target rank 1 (restart 1)"


class Homeless(HashExecutor):
    """Is lost when the test says so, and lacks room until the test says so."""

    lost = has_room = is_late = False

    @property
    def lacks(self) -> str:  # type: ignore[override]
        return RANK if Homeless.lost else ""

    def run(self, plan: RoundPlan) -> list[Verdict]:
        if Homeless.lost:
            raise TargetLostError("target rank 1 died: read failed at /secret/path")
        return super().run(plan)

    def rebuild(self, for_s: float) -> WorkerInfo | None:
        if Homeless.has_room:
            Homeless.lost = False
            return self.info
        time.sleep(for_s)
        if Homeless.is_late:
            raise NoRoomError("no room", 7.0)
        return None


@pytest.fixture
def served() -> Iterator[Served]:
    Homeless.lost = Homeless.has_room = Homeless.is_late = False
    with serving(local_engine(max_model_len=100_000, kind=Homeless)) as running:
        yield running


def is_in(served: Served, state: str) -> bool:
    return metric(served, f'slipstream_target_state{{engine="0",model_name="fake",state="{state}"}}') == 1


def metric(served: Served, name: str) -> float:
    lines = httpx.get(served.url + "/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(name)).rpartition(" ")[2])


def test_clients_are_told_while_there_is_no_room_and_served_when_there_is(served: Served) -> None:
    body = {"model": "fake", "prompt": "x", "max_tokens": 8, "temperature": 0}
    with served.stub() as stub, served.channel() as channel:
        call = stub.Generate(request("x", 90_000))
        served.run(served.busy())
        Homeless.lost = True
        wait_until(lambda: httpx.get(served.url + "/health").status_code == 503)
        health = httpx.get(served.url + "/health").json()["error"]
        assert health["code"] == "no_room"
        assert "target rank 1 died" in health["message"]
        assert "/secret" not in health["message"]
        assert f"there is no room for {RANK}" in health["message"]
        assert "since 20" in health["message"]
        wait_until(lambda: checked(channel, SERVICE) == NOT_SERVING)
        assert is_in(served, "no_room")
        assert metric(served, "slipstream_target_outage_seconds") > 0

        Homeless.is_late = True
        error = failure(lambda: list(call), Code.UNAVAILABLE)
        assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "7000"
        wait_until(lambda: is_in(served, "refusing"))
        answer = httpx.post(served.url + "/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_room")
        assert answer.headers["retry-after"] == "7"
        failure(lambda: list(stub.Generate(request("x"))), Code.UNAVAILABLE)
        refused = 'slipstream_requests_turned_away_total{engine="0",model_name="fake",reason="no_room"}'
        assert metric(served, refused) >= 2

        Homeless.has_room = True
        wait_until(lambda: httpx.get(served.url + "/health").status_code == 200)
        wait_until(lambda: checked(channel, SERVICE) == SERVING)
        answer = httpx.post(served.url + "/v1/completions", json=body)
        assert answer.json()["choices"][0]["text"] == expected("x", 8)
        assert metric(served, "slipstream_target_outage_seconds") == 0
