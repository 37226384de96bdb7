"""The safety options of `slipstream serve`: flags, YAML and environment."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster.cli import main as cli
from cluster.cli import serve as cli_serve
from protos.errors import ConfigError
from runtime.http.options import SafetyOptions

KEY, OTHER_KEY = "sk-one", "sk-two"


def given_to_serve(monkeypatch: pytest.MonkeyPatch, *arguments: str, **environment: str) -> SafetyOptions:
    """Return what `slipstream serve` makes of the command line, without serving."""
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(cli_serve, "run", lambda config, **options: seen.append(options["safety"]))
    CliRunner().invoke(cli.app, ["serve", *arguments], env=environment, catch_exceptions=False)
    return SafetyOptions.of(seen[0])


def test_flags_yaml_and_the_environment_say_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    flags = ("--api-key", KEY, "--api-key", OTHER_KEY, "--max-waiting-requests", "5", "--stream-pacing", "aggregate",
             "--no-cache-salt-by-key", "--request-timeout", "1.5", "--allowed-origins", "https://a.example",
             "--allowed-origins", "https://b.example", "--allowed-hosts", "llm.example")  # fmt: skip
    wanted = SafetyOptions(
        api_key=(KEY, OTHER_KEY),
        max_waiting_requests=5,
        stream_pacing="aggregate",
        cache_salt_by_key=False,
        request_timeout=1.5,
        allowed_origins=("https://a.example", "https://b.example"),
        allowed_hosts=("llm.example",),
    )
    assert given_to_serve(monkeypatch, *flags) == wanted
    path = tmp_path / "serve.yaml"
    path.write_text(
        f"api_key: [{KEY}, {OTHER_KEY}]\nmax-waiting-requests: 5\nstream_pacing: aggregate\n"
        "cache_salt_by_key: false\nrequest_timeout: 1.5\n"
        "allowed-origins: [https://a.example, https://b.example]\nallowed_hosts: [llm.example]\n"
    )
    assert given_to_serve(monkeypatch, "--config", str(path)) == wanted
    told = given_to_serve(monkeypatch, SLIPSTREAM_API_KEY=f"{KEY} {OTHER_KEY}")
    assert told == SafetyOptions(api_key=(KEY, OTHER_KEY))
    assert KEY not in repr(told)
    assert given_to_serve(monkeypatch) == SafetyOptions()


def test_a_variable_without_a_key_does_not_open_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_serve, "serve", lambda *_: pytest.fail("served"))
    for empty in ("", " "):
        with pytest.raises(ConfigError, match="SLIPSTREAM_API_KEY is set, but has no key"):
            CliRunner().invoke(cli.app, ["serve"], env={"SLIPSTREAM_API_KEY": empty}, catch_exceptions=False)


def test_bad_options_are_refused_without_telling_keys() -> None:
    for given in (
        {"max_waiting_requests": 0},
        {"request_timeout": -1},
        {"stream_pacing": "some"},
        {"api_keys": KEY},
        {"header_timeout": float("nan")},
        {"max_connections": "many"},
    ):
        with pytest.raises(ConfigError, match=next(iter(given))):
            SafetyOptions.of(given)
    with pytest.raises(ConfigError, match="list of texts") as refused:
        SafetyOptions.of({"api_key": [12345]})
    assert "12345" not in str(refused.value)
