"""An ssh server for machines without OpenSSH's: runs commands as the user that started it.

    python -m tests.support.distributed.ssh.server FOLDER ADDRESS

The folder has the server's key `host`, and `key.pub`, whose owner is let in.
"""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import asyncssh

DRAINED_S = 0.5
"""After a command has ended, so long is waited for what it wrote. What it left behind may keep its output open."""


async def copy(reader: Any, writer: Any) -> None:
    """Copy bytes until the reader ends."""
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()


async def give(process: Any, command: asyncio.subprocess.Process) -> None:
    """Copy the input of a session to its command."""
    assert command.stdin is not None
    await copy(process.stdin, command.stdin)
    command.stdin.write_eof()


async def run(process: asyncssh.SSHServerProcess[bytes]) -> None:
    """Run the command of one session."""
    command = await asyncio.create_subprocess_exec(
        "bash", *(["-c", process.command] if process.command else ["--login"]), cwd=os.environ["HOME"],
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    given = asyncio.create_task(give(process, command))
    said = asyncio.create_task(copy(command.stdout, process.stdout))
    status = await command.wait()
    await asyncio.wait([said], timeout=DRAINED_S)
    process.exit(status)
    for task in (given, said):
        task.cancel()


async def serve(folder: Path, address: str) -> None:
    """Serve until the process is ended."""
    server = await asyncssh.create_server(
        asyncssh.SSHServer, address, 22, server_host_keys=[str(folder / "host")],
        authorized_client_keys=str(folder / "key.pub"), process_factory=run, encoding=None, line_editor=False,
    )  # fmt: skip
    await server.wait_closed()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2]))
