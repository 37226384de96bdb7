"""The playground: its logic under node, how it is served, and (in full) the page itself in a browser."""

import asyncio
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime.http import pages
from runtime.http.app import create_app
from runtime.http.context import ServerOptions
from tests.support.serving.fake_engine import expected, local_engine, tokenizer
from tests.support.serving.fake_server import served

HERE = Path(__file__).parent
FOLDER = Path(pages.__file__).parent / "playground"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
PROMPT = "the quick brown"


def test_its_logic() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node to run the playground's logic")
    subprocess.run([node, HERE / "playground_core.mjs", FOLDER / "core.js"], check=True, timeout=60)


async def fetch(*paths: str) -> list[httpx.Response]:
    engine = local_engine()
    assert engine.metrics is not None
    app = create_app(engine, tokenizer(), engine.metrics, ServerOptions(("fake",), "1"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        return [await client.get(path) for path in paths]


def test_the_page_and_all_it_loads_come_from_here() -> None:
    page, missing, outside, schema = asyncio.run(
        fetch("/", "/playground/nothing.js", "/playground/..%2Fapp.py", "/openapi.json")
    )
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert (missing.status_code, outside.status_code) == (404, 404)
    assert "playground" not in schema.text
    loaded = sorted(set(re.findall(r'(?:src|href)="([^"]+)"', page.text)))
    assert {"playground/app.js", "playground/style.css"} <= set(loaded)
    files = asyncio.run(fetch(*(f"/{path}" for path in [*loaded, "playground/core.js"])))
    for path, file in zip([*loaded, "core.js"], files, strict=True):
        assert file.status_code == 200, path
        assert "script-src 'self'" in file.headers["content-security-policy"]
        assert file.headers["x-content-type-options"] == "nosniff"
    assert {path.name for path in FOLDER.iterdir()} == set(pages.CONTENT_TYPES), (
        "a file that is never served, or not there"
    )


def test_nothing_external_and_nothing_inline() -> None:
    for path in FOLDER.iterdir():
        text = path.read_text(encoding="utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"(?:https?:)?//[\w-]+\.", text), path.name
        assert "innerHTML" not in text, "model output is text, never markup"
    page = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", page)


@pytest.fixture
def page() -> Iterator[Any]:
    """A page of a browser of this machine; what went wrong in it is in `page.problems`."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    browser_path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser_path is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_path, args=["--no-sandbox"], timeout=180_000)
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.set_default_timeout(120_000)
        page.problems = []
        page.on("pageerror", lambda error: page.problems.append(str(error)))
        page.on("console", lambda said: said.type == "error" and page.problems.append(said.text))
        yield page
        browser.close()


@pytest.mark.full
def test_a_streamed_coloured_answer_with_speculation_on_and_off(page: Any, tmp_path: Path) -> None:
    with served(100_000) as url:
        page.goto(url + "/")
        page.locator("#tab-chat[aria-selected=true]").wait_for()  # the fake has a template
        page.click("#tab-complete")
        page.fill("#prompt", PROMPT)
        page.fill("#max-tokens", "40")
        page.click("#run")
        page.locator("#verdict:not(:empty)").wait_for()
        page.screenshot(path=tmp_path / "playground.png", full_page=True)
        on, off = page.locator(".answer .text").all()
        assert on.inner_text() == off.inner_text() == expected(PROMPT, 40)
        colours = {name: on.locator(f".token.{name}").count() for name in ("accepted", "correction", "bonus", "plain")}
        assert colours["accepted"] > 20
        assert colours["correction"] > 10
        assert off.locator(".token.plain").count() == 40 == off.locator(".token").count()
        green, amber = (
            on.locator(f".token.{name}").first.evaluate("e => getComputedStyle(e).backgroundColor")
            for name in ("accepted", "correction")
        )
        assert green != amber
        figures = page.locator(".answer").first.locator("[data-figure=rate]").inner_text()
        assert figures == "48 %"  # the last steps draft only what still fits
        assert page.locator(".answer").first.locator(".bars div").count() == 4
        on.locator(".token.accepted").first.hover()
        assert "drafted, accepted; 2 of 4 draft tokens accepted" in page.locator("#hint").inner_text()
        assert page.locator("#verdict").inner_text().startswith("The same answer")
    assert page.problems == []


@pytest.mark.full
def test_chat_remembers_and_stop_stops(page: Any) -> None:
    with served(100_000) as url:
        page.goto(url + "/")
        page.locator("#tab-chat[aria-selected=true]").wait_for()
        page.select_option("#mode", "on")
        page.fill("#max-tokens", "6")
        page.fill("#prompt", "hello")
        page.click("#run")
        page.locator("#turns li.assistant").wait_for()
        assert page.locator("#turns li").all_inner_texts()[0] == "hello"
        page.fill("#max-tokens", "50000")
        page.fill("#prompt", "go on and on")
        page.click("#run")
        page.locator(".answer.busy .token").nth(40).wait_for()
        page.click("#stop")
        page.locator("#run:enabled").wait_for()
        assert page.locator(".answer[data-finish=stopped]").count() == 1
        assert page.locator("#problem").is_hidden()
        metrics = httpx.get(url + "/metrics").text
        page.fill("#max-tokens", "5")
        page.fill("#temperature", "900")
        page.click("#run")
        page.locator("#problem:visible").wait_for()
        assert "temperature" in page.locator("#problem").inner_text()
    assert 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="fake"} 1.0' in metrics
