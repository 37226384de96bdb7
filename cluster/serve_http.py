"""`slipstream serve`: the controller in a child process or on Ray, the HTTP face in this one."""

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import uvicorn

from cluster import assemble
from cluster.engine_process import CONFIG
from protos.config import EngineConfig, SpeculativeConfig
from protos.errors import ConfigError
from protos.messages import WorkerInfo
from runtime.channel import Channel
from runtime.engine import AsyncEngine
from runtime.http.app import ServerOptions, create_app
from runtime.http.render import Decoder
from runtime.http.schemas import SpecMetrics
from runtime.http.tools import ToolOptions
from runtime.inputs import Preprocessor, load_tokenizer
from runtime.logs import log_ended, log_to_stderr
from runtime.metrics import Metrics, log_summaries
from runtime.process import ProcessChannel, python_command
from runtime.sampling_defaults import sampling_defaults

log = logging.getLogger("slipstream")

BACKLOG = 2048  # connections that may wait to be accepted
SILENCE_S = 30.0
"""A stage that says nothing for this long is named again."""


@dataclass(frozen=True)
class HttpOptions:
    """Where and how to serve. `grace_s` is how long answers in flight may take once the server is told to stop."""

    version: str
    host: str = "0.0.0.0"
    port: int = 8000
    grace_s: int = 15
    chat_template: str | None = None
    spec_metrics: SpecMetrics = "none"
    tools: ToolOptions = field(default_factory=ToolOptions)


def serve(config: EngineConfig, options: HttpOptions) -> None:
    """Serve until SIGINT or SIGTERM; a second one stops at once.

    Raises:
        ConfigError, ModelError: the engine cannot be built, or the address is taken.
        PlacementError: the Ray cluster has no room for the workers.
        EngineDeadError: the engine ended by itself, while it was loading or later.
    """
    log_to_stderr(config.log_format)
    if config.model.skip_tokenizer_init:
        raise ConfigError("serving needs a tokenizer: leave out skip_tokenizer_init")
    with bound(options.host, options.port) as listener:
        asyncio.run(_Service(config, options, listener).run())


@contextlib.contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """Take the address before anything is loaded, so that a port in use is told at once.

    Raises:
        ConfigError: the address is taken, or is none of this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Without its protocol, asyncio would not turn off Nagle's algorithm, and each answer would wait 40 ms.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cannot listen on {host}:{port} ({error}); choose another host or port") from None
        yield listener


class KillableChannel(Channel, Protocol):
    """A channel whose controller can be ended at once."""

    def kill(self) -> None:
        """End the controller, without waiting."""
        ...


def controller_channel(config: EngineConfig) -> KillableChannel:
    """Return the way to a controller where *config* wants it: in a child process, or on Ray."""
    if config.parallel.executor == "uni":
        return ProcessChannel(python_command("cluster.engine_process"), CONFIG.dump_json(config).decode())
    return assemble.ray_channel(config)


class _Server(uvicorn.Server):
    """Leaves signals to `_Service`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Stages:
    """Says what is being done while the engine loads, and says it again after a silence."""

    def __init__(self) -> None:
        self._text, self._since = "starting the engine process", time.monotonic()

    def say(self, text: str) -> None:
        """Begin a stage."""
        self._text, self._since = text, time.monotonic()
        log.info(text)

    async def remind(self) -> None:
        """Name the stage once every `SILENCE_S`; runs until cancelled."""
        while True:
            await asyncio.sleep(SILENCE_S)
            seconds = time.monotonic() - self._since
            if seconds >= SILENCE_S:
                log.info("still waiting after %.0f s for: %s", seconds, self._text)


class _Service:
    """One run of the server: load, serve, stop."""

    def __init__(self, config: EngineConfig, options: HttpOptions, listener: socket.socket) -> None:
        self._config = config
        self._options = options
        self._listener = listener
        self._names = served_names(config)
        self._defaults = sampling_defaults(config.model)
        self._metrics = Metrics(self._names[0], tell=log_ended if config.log_requests else None)
        self._channel = controller_channel(config)
        self._engine = AsyncEngine(self._channel, self._make_preprocessor, self._metrics)
        self._metrics.follow(self._engine.stats)
        self._stop = asyncio.Event()
        self._server: _Server | None = None
        self._tokenizer: asyncio.Task[Decoder] | None = None

    async def run(self) -> None:
        """Load and serve until told to stop."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        try:
            info = await self._load()
            if info is not None:
                await self._serve(info)
        finally:
            await self._engine.close()
            log.info("stopped")

    def _on_signal(self) -> None:
        """Stop in order; the second time at once."""
        if self._stop.is_set() or self._server is None:
            self._channel.kill()
        if self._server is not None:
            self._server.force_exit = self._stop.is_set()
            self._server.should_exit = True
        if not self._stop.is_set():
            log.info("stopping; answers in flight have %d s, once more stops at once", self._options.grace_s)
        self._stop.set()

    async def _load(self) -> WorkerInfo | None:
        """Start the engine; None if told to stop meanwhile."""
        stages = _Stages()
        self._tokenizer = asyncio.create_task(asyncio.to_thread(self._load_tokenizer))
        loading = asyncio.create_task(self._engine.start(stages.say))
        reminding, stopping = asyncio.create_task(stages.remind()), asyncio.create_task(self._stop.wait())
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        reminding.cancel()
        if self._stop.is_set():
            loading.cancel()
            await asyncio.gather(loading, self._tokenizer, return_exceptions=True)
            return None
        stopping.cancel()
        return loading.result()

    def _load_tokenizer(self) -> Decoder:
        tokenizer = load_tokenizer(self._config.model)
        assert tokenizer is not None, "refused by `serve`"
        if self._options.chat_template is not None:
            tokenizer.chat_template = self._options.chat_template
        return tokenizer

    async def _make_preprocessor(self, info: WorkerInfo) -> Preprocessor:
        assert self._tokenizer is not None
        return assemble.preprocessor(self._config, info, await self._tokenizer)

    async def _serve(self, info: WorkerInfo) -> None:
        assert self._tokenizer is not None
        served = ServerOptions(
            self._names,
            self._options.version,
            unlisted_names=(self._config.model.model,),
            spec_metrics=self._options.spec_metrics,
            tools=self._options.tools,
            sampling_defaults=self._defaults,
        )
        app = create_app(self._engine, await self._tokenizer, self._metrics, served)
        self._server = _Server(uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="off",
            timeout_graceful_shutdown=self._options.grace_s,
            backlog=BACKLOG,
        ))  # fmt: skip
        for line in described(self._config, info):
            log.info(line)
        self._listener.listen(BACKLOG)  # whoever reads the next line may connect at once
        log.info(self._ready_line())
        summaries = None if self._config.disable_log_stats else asyncio.create_task(log_summaries(self._metrics))
        ending = asyncio.create_task(self._end_with_engine(self._server))
        await self._server.serve(sockets=[self._listener])
        ending.cancel()
        if summaries is not None:
            summaries.cancel()
        if not self._server.force_exit and not self._engine.is_alive:
            raise await self._engine.death()

    async def _end_with_engine(self, server: _Server) -> None:
        """Stop serving when the engine is gone for good; whatever supervises this process then starts another."""
        await self._engine.death()
        server.should_exit = True

    def _ready_line(self) -> str:
        port = self._listener.getsockname()[1]
        host = "localhost" if self._options.host in ("0.0.0.0", "::") else self._options.host
        body = f'{{"model": "{self._names[0]}", "prompt": "def fibonacci(n):", "max_tokens": 64}}'
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        return f"ready on {url}; try\n\n  curl {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'\n"


def served_names(config: EngineConfig) -> tuple[str, ...]:
    """Return the names answers carry: those asked for, else the model's; of a folder only its last part."""
    if config.served_model_name:
        return config.served_model_name
    model = config.model.model
    return (Path(model).resolve().name if Path(model).is_dir() else model,)


def described(config: EngineConfig, info: WorkerInfo) -> list[str]:
    """Say what will be served, in lines for the log; of weights and cache the engine has told itself."""
    return [
        f"context: {info.max_model_len:,} tokens; at most {config.scheduler.max_num_seqs} requests run at once",
        f"speculation: {_speculation(config.speculative)}",
    ]


def _speculation(config: SpeculativeConfig | None) -> str:
    if config is None:
        return "off"
    return f"{' + '.join(config.methods)}, K = {config.num_speculative_tokens}"
