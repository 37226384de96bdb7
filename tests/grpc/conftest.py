"""A server for tests that need no special engine."""

from collections.abc import Iterator

import pytest

from tests.support.serving.fake_engine import local_engine
from tests.support.serving.grpc_server import Served, serving

LONG = 100_000


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(local_engine(max_model_len=LONG)) as running:
        yield running
