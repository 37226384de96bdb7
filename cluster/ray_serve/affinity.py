"""Routes requests with a common prefix to the replica that has its KV cache.

A proxy of Ray Serve chooses the replica before it reads the body, so a middleware there reads it first and writes the
digests of the prompt's first blocks into the session header, which routers see. `cluster.ray_serve.router` does the
choosing.
"""

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Sequence
from hashlib import blake2b
from typing import Any

import msgspec
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.http.errors import ApiError
from runtime.http.server.json_size import JsonSize

logger = logging.getLogger("slipstream")

SESSION_HEADER = b"x-session-id"
MARK = "prefix:"
"""Distinguishes our digests from a session id that a client sent."""

BLOCK_CHARS = 256
"""About four blocks of the KV cache: shorter prefixes are not worth routing for."""
MAX_BLOCKS = 32
DIGEST_BYTES = 6
MAX_BODY_BYTES = 1 << 20
"""Longer bodies are forwarded unparsed, and routed to the least loaded replica."""
MAX_HELD_BYTES = 64 << 20
"""Of all bodies that are being read here. While there are more, and after `READ_S`, bodies are forwarded unparsed."""
READ_S = 5.0
MAX_KEYS = 100_000
ROUTES = ("/completions", "/chat/completions", "/responses", "/v1/messages")


class PromptFields(msgspec.Struct):
    """The fields of a body that determine the prompt and its cache salt."""

    instructions: Any = None
    prompt: Any = None
    system: Any = None
    messages: Any = None
    input: Any = None
    cache_salt: str | None = None


def keys_of(body: bytes) -> list[str]:
    """Return the digests of a request's prefixes, the shortest first; empty for one that the replica will refuse."""
    try:
        JsonSize().add(body)
        fields = msgspec.json.decode(body, type=PromptFields)
    except (ApiError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return []
    parts = (fields.instructions, fields.prompt, fields.system, fields.messages, fields.input)
    text = "\n".join(text for part in parts for text in _texts(part))
    return list(_digests(text, fields.cache_salt or ""))


def _texts(prompt: Any) -> Iterator[str]:
    """Yield the text of a prompt or conversation in order; of several prompts, only the first."""
    if isinstance(prompt, str):
        yield prompt
    elif isinstance(prompt, dict):
        yield from (value for name in ("role", "text") if isinstance(value := prompt.get(name), str))
        yield from _texts(prompt.get("content"))
    elif isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        yield from _texts(prompt[0])
    elif isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        yield " ".join(map(str, prompt[: BLOCK_CHARS * MAX_BLOCKS]))
    elif isinstance(prompt, list):
        for part in prompt:
            yield from _texts(part)


def _digests(text: str, salt: str) -> Iterator[str]:
    """Yield a digest of each prefix of *text*, a block longer each. *salt* separates caches."""
    running = salt.encode("utf-8", "surrogatepass")
    for end in range(BLOCK_CHARS, min(len(text), BLOCK_CHARS * MAX_BLOCKS) + 1, BLOCK_CHARS):
        block = text[end - BLOCK_CHARS : end].encode("utf-8", "surrogatepass")
        running = blake2b(running + block, digest_size=DIGEST_BYTES).digest()
        yield running.hex()


def session_of(keys: Sequence[str]) -> str:
    """Return the session header's value for *keys*."""
    return MARK + ".".join(keys)


def keys_in(session: str) -> list[str]:
    """Return the keys in a session header's value; a client's own session id is one key."""
    if session.startswith(MARK):
        return session.removeprefix(MARK).split(".")[:MAX_BLOCKS]
    return [session] if session else []


class PrefixOwners:
    """Which replicas this proxy has sent each prefix to; forgets the oldest prefixes."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._owners: OrderedDict[str, set[str]] = OrderedDict()

    def of(self, keys: Sequence[str], among: Collection[str]) -> set[str]:
        """Return the owners of the longest known prefix of *keys*, *among* these replicas; empty for no match."""
        among = set(among)
        for key in reversed(keys):
            owners = self._owners.get(key)
            if owners and (found := owners & among):
                return found
        return set()

    def learn(self, keys: Sequence[str], replica: str) -> None:
        """Record that *replica* computes these prefixes."""
        for key in keys:
            self._owners.setdefault(key, set()).add(replica)
            self._owners.move_to_end(key)
        while len(self._owners) > self._max_keys:
            self._owners.popitem(last=False)

    def keep(self, replicas: Collection[str]) -> None:
        """Forget all other replicas."""
        for key, owners in list(self._owners.items()):
            owners &= set(replicas)
            if not owners:
                del self._owners[key]


class PrefixHeader:
    """Middleware that adds the session header to requests without one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._num_held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if not _is_wanted(scope):
            await self._app(scope, receive, send)
            return
        read = await self._read(receive)
        keys = keys_of(b"".join(message.get("body", b"") for message in read)) if _is_whole(read) else []
        if keys:
            scope = {**scope, "headers": [*scope["headers"], (SESSION_HEADER, session_of(keys).encode())]}
        await self._app(scope, _replay(read, receive), send)

    async def _read(self, receive: Receive) -> deque[Message]:
        """Read a body as far as the limits allow: the replica, which knows the keys, refuses what it does not want."""
        read: deque[Message] = deque()
        size = 0
        try:
            async with asyncio.timeout(READ_S):
                while size <= MAX_BODY_BYTES and self._num_held <= MAX_HELD_BYTES and not _has_end(read):
                    read.append(await receive())
                    num_bytes = len(read[-1].get("body", b""))
                    size += num_bytes
                    self._num_held += num_bytes
        except TimeoutError:
            logger.debug("a body is slow: forwarded after %d bytes", size)
        finally:
            self._num_held -= size
        return read


def _has_end(read: Sequence[Message]) -> bool:
    return bool(read) and not read[-1].get("more_body", False)


def _is_whole(read: Sequence[Message]) -> bool:
    return _has_end(read) and read[-1]["type"] == "http.request"


def _is_wanted(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].endswith(ROUTES):
        return False
    return all(name.replace(b"_", b"-") != SESSION_HEADER for name, _ in scope["headers"])


def _replay(read: deque[Message], receive: Receive) -> Receive:
    async def again() -> Message:
        return read.popleft() if read else await receive()

    return again


def middlewares() -> list[Middleware]:
    """Return the middlewares of Ray Serve's proxies, configured by import path in `cluster/deploy/serve/`."""
    return [Middleware(PrefixHeader)]
