"""What a server says of itself: the names it serves, what it is, and how far it has come."""

import asyncio
import logging
import time
from pathlib import Path

from protos.config.engine import EngineConfig, SpeculativeConfig
from protos.messages import WorkerInfo

log = logging.getLogger("slipstream")

SILENCE_S = 30.0
"""A stage that says nothing for this long is named again."""


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


def url_host(host: str) -> str:
    """Return *host* as it stands in a URL that reaches it from this machine."""
    if host in ("0.0.0.0", "::"):
        return "localhost"
    return f"[{host}]" if ":" in host else host


class Stages:
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
