"""What a server logs of itself: model names, limits, speculation, and the progress of loading."""

import asyncio
import json
import logging
import shlex
import time
from pathlib import Path

from cluster.cli.options import API_KEY_VARIABLE
from protos.config.engine import EngineConfig, SpeculativeConfig
from protos.messages import WorkerInfo

log = logging.getLogger("slipstream")

SILENCE_S = 30.0
"""A loading stage is logged again after this long without progress."""

COMPLETION = ("/v1/completions", {"prompt": "def fibonacci(n):"})
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "What is speculative decoding?"}]})
"""The route and the body of a first request to a base model, and to one that was trained to chat."""


def served_names(config: EngineConfig) -> tuple[str, ...]:
    """Return the served model names: `served_model_name`, else the model's id or the last part of its folder."""
    if config.served_model_name:
        return config.served_model_name
    model = config.model.model
    return (Path(model).resolve().name if Path(model).is_dir() else model,)


def described(config: EngineConfig, info: WorkerInfo) -> list[str]:
    """Return lines for the log about limits and speculation. The engine logs weights and cache."""
    return [
        f"context: {info.max_model_len:,} tokens; at most {config.scheduler.max_num_seqs} requests run at once",
        f"speculation: {_speculation(config.speculative, info)}",
    ]


def _speculation(config: SpeculativeConfig | None, info: WorkerInfo) -> str:
    if config is None:
        return "off"
    return f"{' + '.join(config.methods)}, K = {info.num_speculative_tokens}"


def url_host(host: str) -> str:
    """Return *host* as written in a URL that reaches it from this machine."""
    if host in ("0.0.0.0", "::"):
        return "localhost"
    return f"[{host}]" if ":" in host else host


def curl_hint(url: str, name: str, *, is_chat: bool, has_key: bool) -> str:
    """Return a `curl` command for the shell that asks the model *name* at *url*."""
    path, request = CHAT if is_chat else COMPLETION
    body = json.dumps({"model": name, **request, "max_tokens": 64}, ensure_ascii=False)
    key = f' -H "Authorization: Bearer ${API_KEY_VARIABLE}"' if has_key else ""
    return f"curl {url}{path} -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"


class LoadingLog:
    """Logs the stages of loading, and the current stage again after a silence."""

    def __init__(self) -> None:
        self._text, self._since = "starting the engine process", time.monotonic()

    def report(self, text: str) -> None:
        """Log the start of a stage."""
        self._text, self._since = text, time.monotonic()
        log.info(text)

    async def remind(self) -> None:
        """Log the current stage every `SILENCE_S` without progress, until cancelled."""
        while True:
            await asyncio.sleep(SILENCE_S)
            seconds = time.monotonic() - self._since
            if seconds >= SILENCE_S:
                log.info("still waiting after %.0f s for: %s", seconds, self._text)
