"""Sends requests that begin alike to the replica that has computed that beginning already.

A proxy of Ray Serve chooses the replica before it reads the body, so a middleware there reads it first and writes the
digests of the prompt's first blocks into the session header, which routers see. `cluster.ray_serve.router` does the
choosing.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from hashlib import blake2b
from typing import Any

import msgspec
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SESSION_HEADER = b"x-session-id"
MARK = "prefix:"
"""What tells our digests from the name of a session, which a client may send itself."""

BLOCK_CHARS = 256
"""About four blocks of the KV cache: shorter beginnings are not worth a detour."""
MAX_BLOCKS = 32
DIGEST_BYTES = 6
MAX_BODY_BYTES = 1 << 20
"""Longer bodies are passed on unread, and go where there is least to do."""
MAX_KEYS = 100_000
ROUTES = ("/completions", "/chat/completions")


class Opening(msgspec.Struct):
    """The part of a body that says how a prompt begins, and whose cache it is in."""

    prompt: Any = None
    messages: Any = None
    cache_salt: str | None = None


def keys_of(body: bytes) -> list[str]:
    """Return the digests of a request's first blocks, the shortest beginning first; none for what is no request."""
    try:
        opening = msgspec.json.decode(body, type=Opening)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return []
    text = "\n".join(_texts(opening.prompt if opening.messages is None else opening.messages))
    return list(_digests(text, opening.cache_salt or ""))


def _texts(prompt: Any) -> Iterator[str]:
    """Yield the words of a prompt or conversation in order; of several prompts only the first counts."""
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
    """Yield a digest of each beginning of *text*, a block longer each; caches under other salts are others."""
    running = salt.encode("utf-8", "surrogatepass")
    for end in range(BLOCK_CHARS, min(len(text), BLOCK_CHARS * MAX_BLOCKS) + 1, BLOCK_CHARS):
        block = text[end - BLOCK_CHARS : end].encode("utf-8", "surrogatepass")
        running = blake2b(running + block, digest_size=DIGEST_BYTES).digest()
        yield running.hex()


def session_of(keys: Sequence[str]) -> str:
    """Return the header's value for *keys*."""
    return MARK + ".".join(keys)


def keys_in(session: str) -> list[str]:
    """Return the keys in a header's value; the name of a client's session is one key."""
    if session.startswith(MARK):
        return session.removeprefix(MARK).split(".")[:MAX_BLOCKS]
    return [session] if session else []


class Owners:
    """Who has computed which beginning, of those that this proxy has sent somewhere; forgets the oldest."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._owners: OrderedDict[str, set[str]] = OrderedDict()

    def of(self, keys: Sequence[str], among: Collection[str]) -> set[str]:
        """Return those *among* the replicas that know the longest of the beginnings *keys*; nobody for no match."""
        for key in reversed(keys):
            owners = self._owners.get(key, set()) & set(among)
            if owners:
                return owners
        return set()

    def learn(self, keys: Sequence[str], replica: str) -> None:
        """Note that *replica* computes these beginnings."""
        for key in keys:
            self._owners.setdefault(key, set()).add(replica)
            self._owners.move_to_end(key)
        while len(self._owners) > self._max_keys:
            self._owners.popitem(last=False)

    def keep(self, replicas: Collection[str]) -> None:
        """Forget every replica that is not one of these."""
        for key, owners in list(self._owners.items()):
            owners &= set(replicas)
            if not owners:
                del self._owners[key]


class PrefixHeader:
    """Writes the session header of requests that have none."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if not _is_wanted(scope):
            await self._app(scope, receive, send)
            return
        read = await _read(receive)
        body = b"".join(message.get("body", b"") for message in read)
        is_whole = not read[-1].get("more_body", False)
        keys = keys_of(body) if is_whole and read[-1]["type"] == "http.request" else []
        if keys:
            scope = {**scope, "headers": [*scope["headers"], (SESSION_HEADER, session_of(keys).encode())]}
        await self._app(scope, _replay(read, receive), send)


def _is_wanted(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].endswith(ROUTES):
        return False
    return all(name.replace(b"_", b"-") != SESSION_HEADER for name, _ in scope["headers"])


async def _read(receive: Receive) -> list[Message]:
    """Read the body, or as much of it as is looked at."""
    read, size = [], 0
    while True:
        message = await receive()
        read.append(message)
        size += len(message.get("body", b""))
        if not message.get("more_body", False) or size > MAX_BODY_BYTES:
            return read


def _replay(read: list[Message], receive: Receive) -> Receive:
    waiting = iter(read)

    async def again() -> Message:
        for message in waiting:
            return message
        return await receive()

    return again


def middlewares() -> list[Middleware]:
    """Return what the proxies of Ray Serve are to run; they ask for it by import path, see `cluster/deploy/serve/`."""
    return [Middleware(PrefixHeader)]
