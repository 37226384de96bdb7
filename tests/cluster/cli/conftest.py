"""Commands that run in this process."""

from typing import Any

import pytest

from cluster.cli import main as cli
from cluster.cli import serve as cli_serve
from protos.config.engine import EngineConfig


def run(*given: str) -> None:
    """Run a command in this process, errors raised."""
    cli.app(list(given), standalone_mode=False)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, Any]]:
    """Record the config and options that `serve` is called with."""
    calls: list[tuple[EngineConfig, Any]] = []
    monkeypatch.setattr(cli_serve, "serve", lambda config, options: calls.append((config, options)))
    return calls
