"""Reads streams of an HTTP server in a separate process, so that reading takes no CPU time of the server's process.

Started by `benchmarks.http_overhead`. Each line of standard input is a JSON list of request bodies. All are sent at
once; the answer is a line with their total number of tokens.
"""

import asyncio
import json
import sys
from typing import Any


async def stream(host: str, port: int, body: dict[str, Any]) -> int:
    """Stream one completion; return its number of tokens."""
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
    """Stream all completions at once; return their total number of tokens."""
    return sum(await asyncio.gather(*(stream(host, port, body) for body in bodies)))


def main() -> None:
    host, port = sys.argv[1], int(sys.argv[2])
    for line in sys.stdin:
        print(asyncio.run(all_of(host, port, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
