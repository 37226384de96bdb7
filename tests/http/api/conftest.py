"""A server that the tests of the OpenAI API share."""

from collections.abc import Iterator

import pytest

from protos.config.engine import SpeculativeConfig
from tests.support.serving.fake_engine import local_engine
from tests.support.serving.http_server import Served, serving

LONG = 100_000


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    drafts = SpeculativeConfig(method="draft_model", num_speculative_tokens=4, model="none", policy="fixed")
    with serving(local_engine(max_model_len=LONG, speculative=drafts)) as running:
        yield running
