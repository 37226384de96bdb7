"""An engine slow enough to be late."""

import pytest

from tests.support.serving import fake_engine


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 10 ms, so that there is time to be late."""
    monkeypatch.setattr(fake_engine, "STEP_S", 0.01)
