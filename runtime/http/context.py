"""What the routes share: the engine, the server's options and the texts of tokens."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from protos.messages import Request
from runtime.frontend.client import EngineClient
from runtime.frontend.pacing import UNPACED, Pacing
from runtime.frontend.speculation_override import apply_override
from runtime.http.errors import ApiError
from runtime.http.origins import OriginRecorder
from runtime.http.output_recorder import HEADER, OutputRecorder, wants_log
from runtime.http.render import TokenTexts
from runtime.http.responses import ModelCard
from runtime.http.schemas import GenerationRequest, SpecMetrics
from runtime.http.server.limits import GuardOptions
from runtime.http.tools.choice import ToolOptions
from runtime.text.output_log import OutputLog


@dataclass(frozen=True)
class ServerOptions:
    """Options of the HTTP and gRPC servers.

    Responses carry the first of `model_names` by default. `unlisted_names` are accepted as aliases of it, but are not
    listed. `sampling_defaults` apply to the sampling parameters that a request leaves out. Answers to requests that ask
    for it are added to `output_log`, as those of `target`, the model's Hub id or folder.
    """

    model_names: tuple[str, ...]
    version: str
    unlisted_names: tuple[str, ...] = ()
    spec_metrics: SpecMetrics = "none"
    tools: ToolOptions = field(default_factory=ToolOptions)
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    guard: GuardOptions = field(default_factory=GuardOptions)
    pacing: Pacing = UNPACED
    output_log: OutputLog | None = None
    target: str = ""
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True)
class RouteContext:
    """What the routes share."""

    engine: EngineClient
    options: ServerOptions
    texts: TokenTexts

    def model_name(self, requested: str | None) -> str:
        """Return the served name for *requested*, the first one for None. Raises `ApiError` 404 if it is not served."""
        names = self.options.model_names
        if requested is None or requested in self.options.unlisted_names:
            return names[0]
        if requested not in names:
            served = ", ".join(names)
            raise ApiError(
                404, f"the model {requested[:200]!r} does not exist; served: {served}", "model", "model_not_found"
            )
        return requested

    def card(self, name: str) -> ModelCard:
        """Describe a served name."""
        return ModelCard(name, self.options.created, self.engine.info.max_model_len)

    def spec_metrics(self, body: GenerationRequest) -> SpecMetrics:
        """Return the level of speculation statistics in the response to *body*."""
        return body.per_request_spec_decode_metrics or self.options.spec_metrics

    def origins(self, body: GenerationRequest) -> OriginRecorder | None:
        """Return a recorder of token origins if *body* requests them."""
        return OriginRecorder(self.texts) if body.token_origins else None

    def recorder(self, headers: Mapping[str, str], requests: Sequence[Request]) -> OutputRecorder | None:
        """Return what logs the answers to *requests*; None unless the server has a log and *headers* ask for it."""
        opened = self.options.output_log
        if opened is None or not wants_log(headers.get(HEADER)):
            return None
        return OutputRecorder(opened, self.options.target, requests)

    def with_options(self, group: Sequence[Request], body: GenerationRequest) -> list[Request]:
        """Return the samples of one prompt with the options of *body* that are not sampling parameters.

        Every choice of a response contains the prompt's log-probabilities, so every sample computes them.

        Raises:
            InvalidRequestError: the speculation override exceeds what is loaded.
        """
        first = group[0].sampling.prompt_logprobs
        return [
            msgspec.structs.replace(
                each,
                wants_steps=self.spec_metrics(body) != "none" or bool(body.token_origins),
                cache_salt=body.cache_salt or "",
                sampling=msgspec.structs.replace(each.sampling, prompt_logprobs=first),
            )
            for each in apply_override(group, body.speculation_override, self.engine.info)
        ]
