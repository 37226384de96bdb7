"""Streams from an HTTP server, read by a process of its own so that reading costs the server nothing.

Started by `benchmarks.http_overhead`: a line of JSON on standard input is a list of bodies; all are asked for at once,
and a line with the number of tokens they got is the answer.
"""

import asyncio
import json
import sys
from typing import Any


async def stream(host: str, port: int, body: dict[str, Any]) -> int:
    """Ask for one streamed completion, and return how many tokens it has."""
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    head = (
        "POST /v1/completions HTTP/1.1",
        "host: bench",
        "connection: close",
        "content-type: application/json",
        f"content-length: {len(content)}",
        "",
        "",
    )
    writer.write("\r\n".join(head).encode() + content)
    last = b""
    async for line in reader:
        if b'"completion_tokens"' in line or b'"error"' in line:
            last = line
    writer.close()
    return int(json.loads(last.removeprefix(b"data: "))["usage"]["completion_tokens"])


async def all_of(host: str, port: int, bodies: list[dict[str, Any]]) -> int:
    """Ask for all at once, and return how many tokens they have together."""
    return sum(await asyncio.gather(*(stream(host, port, body) for body in bodies)))


def main() -> None:
    host, port = sys.argv[1], int(sys.argv[2])
    for line in sys.stdin:
        print(asyncio.run(all_of(host, port, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
