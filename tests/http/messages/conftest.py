"""A server whose fake model generates the text given in the prompt, and Anthropic's client of it."""

from collections.abc import Iterator

import anthropic
import pytest

from protos.config.engine import SpeculativeConfig
from runtime.http.tools.choice import ToolOptions
from tests.support.serving.anthropic_answers import client_of
from tests.support.serving.fake_engine import Scripted, local_engine
from tests.support.serving.http_server import Served, serving

DRAFTS = SpeculativeConfig(method="draft_model", num_speculative_tokens=3, model="none", policy="fixed")
CONTEXT = 4096


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    engine = local_engine(max_model_len=CONTEXT, speculative=DRAFTS, kind=Scripted)
    with serving(engine, tools=ToolOptions("hermes", auto=True)) as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[anthropic.Anthropic]:
    with client_of(served.url) as made:
        yield made
