"""What `slipstream serve` and a replica of Ray Serve set up alike: the tokenizer, the engine's client, and options."""

from cluster.serving.startup_info import served_names
from protos.config.engine import EngineConfig
from runtime.frontend.async_engine import AsyncEngine, MakePreprocessor
from runtime.frontend.channel import Channel
from runtime.http.context import ServerOptions
from runtime.http.options import SafetyOptions
from runtime.http.schemas import SpecMetrics
from runtime.http.tools.choice import ToolOptions
from runtime.metrics.logs import log_request_end
from runtime.metrics.prometheus import Metrics
from runtime.text.sampling_defaults import sampling_defaults
from runtime.text.tokenizer import Tokenizer, load_tokenizer


def tokenizer_of(config: EngineConfig, chat_template: str | None) -> Tokenizer:
    """Return the tokenizer of a server that refuses `skip_tokenizer_init`. *chat_template* replaces the model's."""
    tokenizer = load_tokenizer(config.model)
    assert tokenizer is not None, "the server refuses skip_tokenizer_init"
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def engine_of(
    config: EngineConfig, channel: Channel, make_preprocessor: MakePreprocessor, safety: SafetyOptions
) -> tuple[AsyncEngine, Metrics]:
    """Return the client of the engine behind *channel*, which has not been started, and its metrics."""
    metrics = Metrics(served_names(config)[0], on_end=log_request_end if config.log_requests else None)
    return client_of(channel, make_preprocessor, metrics, safety), metrics


def client_of(
    channel: Channel, make_preprocessor: MakePreprocessor, metrics: Metrics, safety: SafetyOptions
) -> AsyncEngine:
    """Return the client of the engine behind *channel*, with the limits of *safety*; *metrics* read its counters."""
    engine = AsyncEngine(
        channel,
        make_preprocessor,
        metrics,
        timeout_s=safety.request_timeout,
        reading=safety.reading,
        queue=safety.queue,
    )
    metrics.use_stats(engine.stats)
    return engine


def server_options(
    config: EngineConfig, version: str, safety: SafetyOptions, tools: ToolOptions, spec_metrics: SpecMetrics
) -> ServerOptions:
    """Return the options of the HTTP and gRPC servers, without a log of answers."""
    return ServerOptions(
        served_names(config),
        version,
        unlisted_names=(config.model.model,),
        spec_metrics=spec_metrics,
        tools=tools,
        sampling_defaults=sampling_defaults(config.model),
        guard=safety.guard,
        pacing=safety.pacing,
    )
