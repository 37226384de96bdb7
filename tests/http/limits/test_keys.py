"""API keys: which requests need one, and separate prefix caches per key."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from protos.errors import (
    ConfigError,
)
from protos.sampling import SamplingParams
from runtime.frontend.keys import TENANT, Keys
from runtime.http.options import SafetyOptions
from runtime.http.server.paths import MESSAGES_PATHS
from tests.support.serving.fake_engine import expected
from tests.support.serving.guarded_server import Guarded, guarded, guarded_engine

KEY, OTHER_KEY = "sk-one", "sk-two"
LONG = 20_000


def test_keys() -> None:
    keys = Keys([KEY, OTHER_KEY])
    for given in (f"Bearer {KEY}", f"bearer {OTHER_KEY}", f"BEARER  {KEY} "):
        assert keys.accepts(given)
    for given in (
        None,
        "",
        KEY,
        "Bearer",
        "Bearer ",
        f"Basic {KEY}",
        f"Bearer {KEY}x",
        f"Bearer {KEY.upper()}",
        "Bearer " + "x" * 100_000,
        "Bearer \ud800",
    ):
        assert not keys.accepts(given)
    assert KEY not in repr(keys)
    assert all(Keys().accepts(given) for given in (None, "", "Bearer anything"))
    assert keys.tenant(f"Bearer {KEY}") == keys.tenant(f"bearer {KEY}") != keys.tenant(f"Bearer {OTHER_KEY}")
    assert Keys().tenant(f"Bearer {KEY}") == ""


def test_keys_that_cannot_be_sent_are_refused() -> None:
    for key in ("", " ", "a\nb", "é", "x" * 5000):
        with pytest.raises(ConfigError, match="api_key"):
            Keys([key])


@pytest.fixture(scope="module")
def locked() -> Iterator[Guarded]:
    with guarded(LONG, api_key=(KEY, OTHER_KEY)) as running:
        yield running


def test_every_route_but_health_needs_a_key(locked: Guarded) -> None:
    known = [*locked.get("/openapi.json", headers={"authorization": f"Bearer {KEY}"}).json()["paths"]]
    assert {"/metrics", "/version", "/v1/models", "/v1/completions", "/tokenize"} <= {*known}
    odd = ["/openapi.json", "/", "/nowhere", "//health", "/health/", "/healthy", "/HEALTH", "/%68ealth/x"]
    for path in {*known, *odd} - {"/health"}:
        for method in ("GET", "POST"):
            answer = locked.client.request(method, locked.url + path.replace("{name}", "x").replace("{name:path}", "x"))
            assert answer.status_code == 401, (method, path)
            scheme = "Basic" if (method, path) == ("GET", "/") else "Bearer"  # so that a browser prompts for the key
            assert answer.headers["www-authenticate"].startswith(scheme)
            error = answer.json()["error"]
            assert error["type"] == "authentication_error"
            assert path in MESSAGES_PATHS or error["code"] == "invalid_api_key"
    assert locked.get("/health").status_code == 200


def test_a_browser_is_asked_for_the_key_and_its_password_opens_the_page_alone(locked: Guarded) -> None:
    for key, status in ((KEY, 200), ("sk-three", 401), ("", 401)):
        assert locked.get("/", auth=("anybody", key)).status_code == status
    assert locked.get("/playground/app.js", auth=("", OTHER_KEY)).status_code == 200
    assert locked.get("/v1/models", auth=("", KEY)).status_code == 401
    assert locked.client.post("/v1/completions", json={"prompt": "x"}, auth=("", KEY)).status_code == 401
    assert locked.get("/", headers={"authorization": "Basic !nonsense"}).status_code == 401


def test_the_path_that_counts_is_the_one_that_is_routed(locked: Guarded) -> None:
    for host in ("localhost/health?", "localhost/health#", "x@y/health", "localhost:80/health/", "/health"):
        request = f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
        assert locked.raw(request).split(b" ", 2)[1] in (b"401", b"400")
    absolute = b"GET http://localhost/health/../v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert locked.raw(absolute).split(b" ", 2)[1] == b"401"


def test_the_real_client_and_its_key(locked: Guarded) -> None:
    for key, is_known in ((KEY, True), (OTHER_KEY, True), ("sk-three", False)):
        client = openai.OpenAI(base_url=locked.url + "/v1", api_key=key, max_retries=0)
        if is_known:
            assert client.completions.create(model="fake", prompt="x", max_tokens=3).choices[0].text == expected("x", 3)
        else:
            with pytest.raises(openai.AuthenticationError):
                client.models.list()
        client.close()


def test_keys_do_not_share_caches(locked: Guarded) -> None:
    prompt = "the quick brown fox jumps over the lazy dog " * 10

    def cached(key: str, **body: Any) -> int:
        answer = locked.client.post(
            "/v1/completions",
            json={"prompt": prompt, "max_tokens": 1, **body},
            headers={"authorization": f"Bearer {key}"},
        )
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached(KEY) == 0
    assert cached(KEY) > 0
    assert cached(OTHER_KEY) == 0
    assert cached(OTHER_KEY) > 0
    assert cached(KEY, cache_salt="mine") == 0
    assert cached(KEY, cache_salt="mine") > 0


def test_without_keys_any_key_is_taken() -> None:
    with guarded() as served:
        for headers in ({}, {"authorization": "Bearer"}, {"authorization": "Bearer whatever"}):
            assert served.get("/v1/models", headers=headers).status_code == 200


# Tenants


def test_a_tenant_is_part_of_what_separates_caches() -> None:
    async def check() -> None:
        engine = guarded_engine(SafetyOptions())
        await engine.start()
        sent: list[str] = []
        engine._channel.send = lambda commands: sent.extend(group.first.cache_salt for group in commands.groups)  # type: ignore[method-assign]
        for name, tenant in (("a", ""), ("b", "t1"), ("c", "t2")):
            TENANT.set(tenant)
            stream = engine.stream(await engine.prepare({"prompt": "x", "cache_salt": "s"}, SamplingParams(), name))
            task = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        TENANT.set("")
        assert sent == ["s", "t1/s", "t2/s"]
        await engine.close()

    asyncio.run(check())
