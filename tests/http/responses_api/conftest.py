"""A server whose fake model generates the text given in the prompt."""

from collections.abc import Iterator

import pytest

from protos.config.engine import SpeculativeConfig
from runtime.http.tools.choice import ToolOptions
from tests.support.serving.fake_engine import Scripted, local_engine
from tests.support.serving.http_server import Served, serving


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    drafts = SpeculativeConfig(method="draft_model", num_speculative_tokens=3, model="none", policy="fixed")
    engine = local_engine(max_model_len=4096, speculative=drafts, kind=Scripted)
    with serving(engine, tools=ToolOptions("hermes", auto=True)) as running:
        yield running
