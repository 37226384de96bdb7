"""Requests of web pages: from the server's own page, from other sites, and under foreign host names."""

import asyncio
import contextlib
from collections.abc import Iterator

import httpx
import pytest

from cluster.serving.frontend import ServerContext
from cluster.serving.http_server import HttpFrontend, HttpOptions
from protos.errors import ConfigError
from runtime.http.context import ServerOptions
from runtime.http.options import SafetyOptions
from runtime.http.pages import PATHS
from runtime.http.server.sites import ForeignRequestError, Sites
from tests.http.test_bad_input import POSTED, refused
from tests.support.serving.fake_engine import expected, tokenizer
from tests.support.serving.guarded_server import Guarded, guarded, guarded_engine

THEIRS = "https://evil.example"
BODY = {"prompt": "x", "max_tokens": 3}
PAGE_GET = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}


@pytest.fixture(scope="module")
def served() -> Iterator[Guarded]:
    with guarded() as running:
        yield running


@pytest.mark.parametrize("path", POSTED)
def test_bodies_without_a_content_type_are_refused(served: Guarded, path: str) -> None:
    """A page of another site can send them without asking first."""
    for kind in (b"", b"Content-Type: text/plain\r\n", b"Content-Type:\r\n"):
        head = b"POST %s HTTP/1.1\r\nHost: x\r\n%sContent-Length: 2\r\nConnection: close\r\n\r\n{}"
        answer = served.raw(head % (path.encode(), kind))
        assert answer.startswith(b"HTTP/1.1 415 "), answer
        assert b"content-type: application/json" in answer


@pytest.mark.parametrize("path", [*POSTED, "/health", "/metrics", "/v1/models", "/nowhere"])
def test_pages_of_other_sites_are_refused(served: Guarded, path: str) -> None:
    method = "POST" if path in POSTED else "GET"
    for headers in (
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "cross-site", "origin": THEIRS},
        {"origin": THEIRS},
        {"origin": "null"},
        {"origin": f"http://127.0.0.1:{served.port + 1}"},
        {"origin": "http://127.0.0.1:1", "sec-fetch-site": "same-site"},  # another port is another origin
        {"origin": f"{THEIRS}.127.0.0.1:{served.port}"},
        {"origin": "http://["},
        {"origin": ""},
    ):
        answer = served.client.request(method, path, json={} if method == "POST" else None, headers=headers)
        assert "--allowed-origins" in refused(answer, 403)
        assert "access-control-allow-origin" not in answer.headers


def test_programs_and_the_servers_own_page_are_answered(served: Guarded) -> None:
    own = {"origin": served.url}
    behind_a_proxy = {"origin": "https://chat.example", "sec-fetch-site": "same-origin"}
    for headers in ({}, own, {**own, "sec-fetch-site": "same-origin"}, behind_a_proxy, {"sec-fetch-site": "none"}):
        answer = served.client.post("/v1/completions", json=BODY, headers=headers)
        assert answer.json()["choices"][0]["text"] == expected("x", 3)
    for path in PATHS - {"/playground/index.html"}:
        assert served.get(path, headers={"sec-fetch-site": "same-origin"}).status_code == 200
    assert served.get("/", headers=PAGE_GET).status_code == 200  # a link on another site
    refused(served.get("/v1/models", headers=PAGE_GET), 403)


def test_allowed_origins_are_answered_and_told_so() -> None:
    asking = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    with guarded(allowed_origins=["https://chat.example"], api_key=["sk"]) as served:
        ours = {"origin": "https://chat.example", "sec-fetch-site": "cross-site"}
        asked = served.client.options("/v1/completions", headers={**ours, **asking})
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, ours["origin"])
        key = {"authorization": "Bearer sk"}
        answer = served.client.post("/v1/completions", json=BODY, headers={**ours, **key})
        assert answer.json()["choices"][0]["text"] == expected("x", 3)
        assert answer.headers["access-control-allow-origin"] == ours["origin"]
        assert served.client.post("/v1/completions", json=BODY, headers=ours).status_code == 401
        theirs = {"origin": THEIRS, "sec-fetch-site": "cross-site"}
        assert served.client.options("/v1/completions", headers={**theirs, **asking}).status_code == 400
        refused(served.client.post("/v1/completions", json=BODY, headers={**theirs, **key}), 403)
    with guarded(allowed_origins=["*"]) as served:
        answer = served.client.post("/v1/completions", json=BODY, headers={"origin": "null"})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")


# Host names


def status_of(host: str, sites: Sites) -> int:
    """Return the status of a request under *host* with *sites*."""
    scope = {"type": "http", "method": "GET", "headers": [(b"host", host.encode())]}
    try:
        sites.check(scope, "/health")
    except ForeignRequestError:
        return 403
    return 200


def test_the_host_name_is_checked_on_the_loopback() -> None:
    local = Sites().bound_to("127.0.0.1")
    for host in (
        "localhost",
        "LOCALHOST:8000",
        "127.0.0.1:8000",
        "[::1]:8000",
        "192.168.1.7",
        "a.localhost",
    ):
        assert status_of(host, local) == 200, host
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "", "[",
                 "127.0.0.1@evil.example", "evil.example:x"):  # fmt: skip
        assert status_of(host, local) == 403, host
        assert status_of(host, Sites().bound_to("0.0.0.0")) == 200
        assert status_of(host, Sites(hosts=("*",)).bound_to("127.0.0.1")) == 200
    named = Sites(hosts=("llm.example",))
    for sites in (named, named.bound_to("0.0.0.0"), named.bound_to("localhost")):
        assert status_of("LLM.example:443", sites) == 200
        assert status_of("evil.example", sites) == 403
    assert status_of("llm.here:8000", named.bound_to("llm.here")) == 200


def test_bad_origins_and_hosts_are_refused_at_the_start() -> None:
    for given in ("chat.example", "https://chat.example/", "https://chat.example/path", "https://", ""):
        with pytest.raises(ConfigError, match="allowed_origins must be"):
            _ = SafetyOptions.of({"allowed_origins": [given]}).guard
    for given in ("https://chat.example", "chat.example:80", "a b", ""):
        with pytest.raises(ConfigError, match="allowed_hosts must be"):
            _ = SafetyOptions.of({"allowed_hosts": [given]}).guard


def test_a_server_on_the_loopback_knows_that_it_is() -> None:
    async def check() -> None:
        engine = guarded_engine(SafetyOptions())
        await engine.start()
        frontend = HttpFrontend(HttpOptions("127.0.0.1", 0), SafetyOptions().connections)
        await frontend.start()
        assert engine.metrics is not None
        await frontend.open(ServerContext(engine, tokenizer(), engine.metrics, ServerOptions(("fake",), "1")))
        serving = asyncio.create_task(frontend.serve())
        async with httpx.AsyncClient(base_url=frontend.address) as client:
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/health", headers={"host": "evil.example"})).status_code == 403
        await frontend.stop(at_once=True)
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        await engine.close()

    asyncio.run(check())
