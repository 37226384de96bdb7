"""One engine with its HTTP and gRPC applications, in the process of a Ray Serve replica."""

import asyncio
import logging
import os

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster import assemble
from cluster.channels import process_channel
from cluster.cli.env import version
from cluster.cli.options import API_KEY_VARIABLE, check_key_variable
from cluster.ray.channel import RayChannel
from cluster.ray.metrics import RayMetrics
from cluster.ray.placement_provider import ReplicaPlacementGroup
from cluster.ray_serve.arguments import ServerArguments
from cluster.ray_serve.autoscaling import reported
from cluster.serving.setup import engine_of, server_options, tokenizer_of
from cluster.serving.startup_info import described
from protos.config.engine import EngineConfig
from protos.errors import EngineDeadError
from protos.messages import WorkerInfo
from runtime.frontend.channel import Channel
from runtime.frontend.client import EngineClient
from runtime.grpc.health import is_ready
from runtime.grpc.service import GenerationService
from runtime.http.app import create_app
from runtime.http.render import TokenTexts
from runtime.metrics.logs import log_to_stderr
from runtime.metrics.prometheus import log_summaries
from runtime.text.preprocessor import Preprocessor

log = logging.getLogger("slipstream")


class StripRequestId:
    """Removes our `x-request-id` from responses: Serve's proxies add the same header."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""

        async def without(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(name, value) for name, value in message["headers"] if name != b"x-request-id"]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, without)


class Replica:
    """An engine and its applications. Belongs to the event loop it was started on."""

    def __init__(self, config: EngineConfig, settings: ServerArguments) -> None:
        log_to_stderr(config.log_format)
        self._config, self._settings = config, with_keys(settings)
        self._options = server_options(
            config, version(), self._settings, settings.tools, settings.per_request_spec_decode_metrics
        )
        self.guard = self._options.guard
        self._tokenizer = tokenizer_of(config, settings.chat_template)
        self._engine, self._metrics = engine_of(config, _channel(config), self._make_preprocessor, settings)
        self._tasks: list[asyncio.Task[None]] = []

    async def _make_preprocessor(self, info: WorkerInfo) -> Preprocessor:
        return assemble.make_preprocessor(self._config, info, self._tokenizer)

    async def start(self) -> None:
        """Load the engine; clean up on failure.

        Raises:
            ConfigError, ModelError, PlacementError, EngineDeadError: the engine could not be started.
        """
        try:
            info = await self._engine.start()
        except BaseException:
            await self._engine.close()
            raise
        for line in described(self._config, info):
            log.info(line)
        self._tasks.append(asyncio.create_task(RayMetrics(self._metrics).run()))
        if not self._config.disable_log_stats:
            self._tasks.append(asyncio.create_task(log_summaries(self._metrics)))

    def app(self) -> FastAPI:
        """Return the HTTP application."""
        app = create_app(self._engine, self._tokenizer, self._metrics, self._options)
        app.add_middleware(StripRequestId)
        return app

    def answering(self) -> GenerationService:
        """Return the gRPC methods."""
        return GenerationService(self._engine, TokenTexts(self._tokenizer), self._options)

    @property
    def is_alive(self) -> bool:
        """Whether the engine is alive, even if it cannot answer now."""
        return self._engine.is_alive

    @property
    def is_ready(self) -> bool:
        """Whether requests are accepted and run now."""
        return is_ready(self._engine)

    def check(self) -> None:
        """See `check`."""
        check(self._engine, self._settings.heartbeat_timeout_s)

    def load(self) -> dict[str, float]:
        """Return what the autoscaling policy needs to know."""
        return reported(self._engine.stats())

    async def close(self) -> None:
        """Close the engine and end its processes."""
        for task in self._tasks:
            task.cancel()
        await self._engine.close()


def check(engine: EngineClient, heartbeat_timeout_s: float) -> None:
    """Check that the controller is alive. Its workers do not matter: it replaces them itself.

    Raises:
        EngineDeadError: the controller has ended, or has been silent for too long.
    """
    if not engine.is_alive:
        raise EngineDeadError("the controller has ended; see its log")
    if engine.silence_s > heartbeat_timeout_s:
        raise EngineDeadError(
            f"the controller has been silent for {engine.silence_s:.0f} s; heartbeat_timeout_s is "
            f"{heartbeat_timeout_s:g}"
        )


def with_keys(settings: ServerArguments) -> ServerArguments:
    """Add the API keys of this process's environment. Raises `ConfigError` if the variable is set without a key."""
    check_key_variable()
    keys = tuple(os.environ.get(API_KEY_VARIABLE, "").split())
    return settings.model_copy(update={"api_key": (*settings.api_key, *keys)})


def _channel(config: EngineConfig) -> Channel:
    """Return the channel to a controller in a child process, or in this replica's placement group."""
    if config.parallel.executor == "uni":
        return process_channel(config)
    return RayChannel(config, provider=ReplicaPlacementGroup())
