"""`slipstream serve`: the HTTP and gRPC servers in this process, the controller in a child process or on Ray."""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cluster import assemble
from cluster.channels import controller_channel
from cluster.serving.file_limit import raise_file_limit, within_files
from cluster.serving.frontend import Frontend, ServerContext
from cluster.serving.grpc_server import GrpcFrontend, GrpcOptions
from cluster.serving.http_server import HttpFrontend, HttpOptions
from cluster.serving.setup import engine_of, server_options, tokenizer_of
from cluster.serving.startup_info import LoadingLog, curl_hint, described
from cluster.settings import is_demo
from protos.config.engine import EngineConfig
from protos.errors import ConfigError
from protos.messages import WorkerInfo
from runtime.heap import freeze_heap
from runtime.http.options import SafetyOptions
from runtime.http.schemas import SpecMetrics
from runtime.http.tools.choice import ToolOptions
from runtime.metrics.logs import log_to_stderr
from runtime.metrics.prometheus import log_summaries
from runtime.text.output_log import OutputLog
from runtime.text.preprocessor import Preprocessor
from runtime.text.tokenizer import Tokenizer

log = logging.getLogger("slipstream")

POLL_S = 0.02


@dataclass(frozen=True)
class ServiceOptions:
    """The server's options. `grpc` None: no gRPC server. `grace_s`: time for running answers after a stop signal.

    `output_log`: file to which answers are added, for requests that ask for it.
    """

    version: str
    http: HttpOptions = field(default_factory=HttpOptions)
    grpc: GrpcOptions | None = field(default_factory=GrpcOptions)
    grace_s: float = 30.0
    chat_template: str | None = None
    spec_metrics: SpecMetrics = "none"
    tools: ToolOptions = field(default_factory=ToolOptions)
    safety: SafetyOptions = field(default_factory=lambda: SafetyOptions.of({}))
    output_log: Path | None = None


def serve(config: EngineConfig, options: ServiceOptions) -> None:
    """Serve until SIGINT or SIGTERM; a second signal stops at once.

    Raises:
        ConfigError, ModelError: the engine cannot be built, or an address is in use.
        PlacementError: the Ray cluster has no room for the workers.
        EngineDeadError: the engine died, while loading or later.
    """
    log_to_stderr(config.log_format)
    if config.model.skip_tokenizer_init:
        raise ConfigError("serving needs a tokenizer: leave out skip_tokenizer_init")
    num_servers = 1 if options.grpc is None else 2
    connections = within_files(options.safety.connections, raise_file_limit(), num_servers)
    frontends: list[Frontend] = [HttpFrontend(options.http, connections)]
    if options.grpc is not None:
        frontends.append(GrpcFrontend(options.grpc, options.safety.guard, connections))
    config = replace(config, model=replace(config.model, compile_in_background=True))
    asyncio.run(_Service(config, options, frontends).run())


class _Service:
    """One run of the server: load, serve, drain, stop."""

    def __init__(self, config: EngineConfig, options: ServiceOptions, frontends: Sequence[Frontend]) -> None:
        self._config = config
        self._options = options
        self._frontends = frontends
        self._served = replace(
            server_options(config, options.version, options.safety, options.tools, options.spec_metrics),
            output_log=None if options.output_log is None else OutputLog(options.output_log),
            target=config.model.model,
        )
        self._channel = controller_channel(config)
        self._engine, self._metrics = engine_of(config, self._channel, self._make_preprocessor, options.safety)
        self._stop, self._stop_at_once = asyncio.Event(), asyncio.Event()
        self._is_serving = False
        self._tokenizer: asyncio.Task[Tokenizer] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Load and serve until stopped."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        try:
            for frontend in self._frontends:
                await frontend.start()
            info = await self._load()
            if info is not None:
                await self._serve(info)
        finally:
            await self._end()

    def _on_signal(self) -> None:
        """Drain and stop; on a second signal, or while loading, stop at once."""
        if self._stop.is_set() or not self._is_serving:
            self._channel.kill()
            self._stop_at_once.set()
        if not self._stop.is_set():
            log.info("stopping; running answers have %g s, a second signal stops at once", self._options.grace_s)
        self._stop.set()

    async def _load(self) -> WorkerInfo | None:
        """Start the engine; return None if stopped meanwhile."""
        stages = LoadingLog()
        self._tokenizer = asyncio.create_task(
            asyncio.to_thread(tokenizer_of, self._config, self._options.chat_template)
        )
        engine = asyncio.create_task(self._engine.start(stages.report))
        loading = asyncio.gather(engine, self._tokenizer)
        reminding, stopping = asyncio.create_task(stages.remind()), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
            return None if self._stop.is_set() else (await loading)[0]
        finally:
            unfinished = (engine, self._tokenizer, reminding, stopping)
            for task in unfinished:
                task.cancel()
            await asyncio.gather(loading, *unfinished, return_exceptions=True)

    async def _make_preprocessor(self, info: WorkerInfo) -> Preprocessor:
        assert self._tokenizer is not None
        return assemble.make_preprocessor(self._config, info, await self._tokenizer)

    async def _serve(self, info: WorkerInfo) -> None:
        assert self._tokenizer is not None
        tokenizer = await self._tokenizer
        context = ServerContext(self._engine, tokenizer, self._metrics, self._served)
        for frontend in self._frontends:
            await frontend.open(context)
        freeze_heap()
        for line in described(self._config, info):
            log.info(line)
        log.info(self._ready_line(tokenizer))
        self._is_serving = True
        self._tasks = [asyncio.create_task(frontend.serve()) for frontend in self._frontends]
        if not self._config.disable_log_stats:
            self._tasks.append(asyncio.create_task(log_summaries(self._metrics)))
        await _first(self._stop.wait(), self._engine.death(), *self._tasks)
        await self._drain()
        if not self._stop_at_once.is_set() and not self._engine.is_alive:
            raise await self._engine.death()

    async def _drain(self) -> None:
        """Reject new requests and wait for running answers, up to `grace_s` or a second signal."""
        self._engine.drain()
        for frontend in self._frontends:
            await frontend.publish_health()
        await _first(self._idle(), self._stop_at_once.wait(), asyncio.sleep(self._options.grace_s))

    async def _idle(self) -> None:
        while any(frontend.num_running for frontend in self._frontends):  # noqa: ASYNC110 - servers report no end of a call
            await asyncio.sleep(POLL_S)

    async def _end(self) -> None:
        """Close the engine, which fails unfinished requests; then stop the servers, which send those errors."""
        await self._engine.close()
        for frontend in self._frontends:
            await frontend.stop(at_once=self._stop_at_once.is_set())
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        log.info("stopped")

    def _ready_line(self, tokenizer: Tokenizer) -> str:
        url, *others = [frontend.address for frontend in self._frontends]
        is_chat = bool(tokenizer.chat_template) and not is_demo(self._config)
        curl = curl_hint(url, self._served.model_names[0], is_chat=is_chat, has_key=bool(self._options.safety.api_key))
        return f"ready on {', '.join([url, *others])}; try\n\n  {curl}\n"


async def _first(*waits: Awaitable[Any]) -> None:
    """Wait for the first of *waits* and raise its error. Cancel the others, except tasks that were passed in."""
    tasks = [asyncio.ensure_future(each) for each in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task, given in zip(tasks, waits, strict=True):
            if task is not given:
                task.cancel()
    for task in done:
        task.result()
