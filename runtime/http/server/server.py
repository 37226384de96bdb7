"""What the routes work with: the engine, what the server was told beside it, and the texts of tokens."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.frontend.client import EngineClient
from runtime.frontend.pacing import UNPACED, Pacing
from runtime.http.errors import ApiError
from runtime.http.origins import Origins
from runtime.http.render import TokenTexts
from runtime.http.responses import ModelCard
from runtime.http.schemas import GenerationRequest, SpecMetrics
from runtime.http.server.limits import GuardOptions
from runtime.http.tools.choice import ToolOptions
from runtime.metrics.prometheus import Metrics


@dataclass(frozen=True)
class ServerOptions:
    """What the server is told beside its engine.

    The first of `model_names` is the one answers carry by default; `unlisted_names` are taken for it, but not told.
    `sampling_defaults` are the sampling parameters of requests that do not give them.
    """

    model_names: tuple[str, ...]
    version: str
    unlisted_names: tuple[str, ...] = ()
    spec_metrics: SpecMetrics = "none"
    tools: ToolOptions = field(default_factory=ToolOptions)
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    guard: GuardOptions = field(default_factory=GuardOptions)
    pacing: Pacing = UNPACED
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True)
class Server:
    """What the routes work with."""

    engine: EngineClient
    metrics: Metrics
    options: ServerOptions
    texts: TokenTexts

    def model_name(self, asked: str | None) -> str:
        """Return the served name *asked* for. Raises `ApiError` 404 for a name that is not served."""
        names = self.options.model_names
        if asked is None or asked in self.options.unlisted_names:
            return names[0]
        if asked not in names:
            served = ", ".join(names)
            raise ApiError(
                404, f"the model {asked[:200]!r} does not exist; served: {served}", "model", "model_not_found"
            )
        return asked

    def card(self, name: str) -> ModelCard:
        """Describe a served name."""
        return ModelCard(name, self.options.created, self.engine.info.max_model_len)

    def spec_metrics(self, body: GenerationRequest) -> SpecMetrics:
        """Return how much the answer to *body* tells of speculation."""
        return body.per_request_spec_decode_metrics or self.options.spec_metrics

    def origins(self, body: GenerationRequest) -> Origins | None:
        """Return what writes down where the tokens of the answer to *body* come from, if it asks for that."""
        return Origins(self.texts) if body.token_origins else None
