"""`serve deploy` of the shipped config: replicas and controllers that are killed or replaced."""

import os
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.support.distributed.deployments import DEPLOY, load
from tests.support.distributed.ray_requests import PROMPTS, asked, completed, streams_under
from tests.support.distributed.ray_serving import PATIENCE_S, Cluster, members, on_ports_of, until
from tests.support.processes import wait_gone

pytestmark = [pytest.mark.full, pytest.mark.timeout(0)]
NOTICED_S = 20.0
"""Seconds within which proxies notice a replica's death."""


class Watch:
    """Polls the health and a completion: a healthy server must answer."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.said: list[tuple[float, int, int]] = []

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        while not self._stop.wait(0.2):
            at = time.monotonic()
            self.said.append((at, self._status("GET", "/health"), self._status("POST", "/v1/completions")))

    def _status(self, method: str, path: str) -> int:
        sent = asked("x", max_tokens=1) if method == "POST" else None
        try:
            return httpx.request(method, self._url + path, json=sent, timeout=PATIENCE_S).status_code
        except httpx.TransportError:
            return 0

    def since(self, moment: float) -> list[tuple[int, int]]:
        return [(health, answer) for at, health, answer in self.said if at > moment]


def test_a_replica_that_is_killed_takes_only_its_own_streams_and_returns(
    served: Cluster, wanted: dict[str, str]
) -> None:
    before = served.replicas()
    name, pid = next(iter(before.items()))
    family = [pid, *members(pid)]
    killed_at = 0.0

    def kill() -> None:
        nonlocal killed_at
        killed_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)

    with Watch(served.url) as watch:
        results = streams_under(served, kill)
        wait_gone(family, 30.0)  # what the replica had started is gone with it
        until(lambda: len(served.replicas()) == 2 and name not in served.replicas(), "another replica")
        returned_at = time.monotonic()
        until(lambda: len(watch.since(returned_at)) >= 3, "health after that")
    whole = {prompt: stream for prompt, stream in results.items() if stream.is_whole}
    assert 0 < len(whole) < len(PROMPTS), "both replicas had streams, and one of them went on"
    for prompt, stream in whole.items():
        assert stream.text == wanted[prompt]
    for prompt, stream in results.items():
        if prompt not in whole:
            assert stream.error is not None
            assert wanted[prompt].startswith(stream.text)
    assert set(before) - {name} <= set(served.replicas())
    assert {(health, answer) for at, health, answer in watch.said if at < killed_at - 5} <= {(200, 200)}
    # Until proxies have noticed, a request may still meet the dead one; from then on there is one that is well.
    assert all(status == (200, 200) for status in watch.since(killed_at + NOTICED_S)), watch.since(killed_at)
    seen = sorted({health for health, _ in watch.since(killed_at)})
    said = f"{len(whole)} of {len(PROMPTS)} streams went on; replaced after {returned_at - killed_at:.1f} s"
    print(f"{said}; /health said {seen} meanwhile")


def test_a_controller_that_is_killed_is_an_error_in_words_and_its_replica_is_replaced(served: Cluster) -> None:
    """The replica keeps running and reports an error to its clients; Serve replaces it after a failed health check."""
    before = served.replicas()
    name, pid = next(iter(before.items()))
    engine = engine_of(pid)
    results = streams_under(served, lambda: os.kill(engine, signal.SIGKILL))
    errors = {stream.error for stream in results.values() if not stream.is_whole}
    assert errors == {"engine_dead"}
    assert any(stream.is_whole for stream in results.values())
    until(lambda: len(served.replicas()) == 2 and name not in served.replicas(), "another replica")
    wait_gone([pid], 60.0)


def engine_of(replica: int) -> int:
    """Return the process id of a replica's controller, which is its only child in Python."""
    found = [pid for pid in members(replica) if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(found) == 1
    return found[0]


# Deploying again, and ending.


def test_what_runs_ends_before_its_replica_does(served: Cluster, wanted: dict[str, str]) -> None:
    """A config that changes replaces replicas; streams that have begun are finished by those that began them."""
    config = on_ports_of(served, load(DEPLOY / "serve" / "config.yaml"))
    config["applications"][0]["args"]["max_num_seqs"] = 24
    before = set(served.replicas())
    results = streams_under(served, lambda: served.deploy(config))
    assert {prompt: stream.text for prompt, stream in results.items()} == wanted
    assert all(stream.is_whole for stream in results.values())
    assert before.isdisjoint(served.replicas())


def test_a_wrong_config_is_refused_and_disturbs_no_request(served: Cluster) -> None:
    config = on_ports_of(served, load(DEPLOY / "serve" / "config.yaml"))
    config["applications"][0]["args"]["modle"] = "x"
    with pytest.raises(AssertionError, match="unknown argument 'modle', did you mean 'model'"):
        served.deploy(config)
    assert completed(served.url, "x", max_tokens=1)
