"""Clients of a Serve application on several machines, some of which do not answer.

    python -m tests.support.distributed.chaos_load ORDER.json

Runs on one of the machines. Each client asks one machine after another, without a pause, until there is a file `stop`
in the folder of ORDER; then it writes `answers` there: for each request when it began and ended, the address, the
prompt and the text, or what came instead of it.
"""

import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import httpx

TIMEOUT_S = 30.0
LONGEST = 160
"""Characters of an error that is kept."""
PAUSE_S = 0.5
"""After an error, before the next request: a client that is told to try later does not try at once."""


async def ask(client: httpx.AsyncClient, address: str, asked: dict[str, Any]) -> dict[str, str]:
    """Return the text of the answer, or its error. An answer in one piece has no token before its end."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            answer = await client.post(f"http://{address}:8000/v1/completions", json=asked)
    except TimeoutError:
        return {"error": "no answer in time"}
    except httpx.TransportError as error:
        return {"error": type(error).__name__}
    if answer.status_code != 200:
        return {"error": f"{answer.status_code} {code_of(answer)}".strip()}
    return {"text": answer.json()["choices"][0]["text"]}


def code_of(answer: httpx.Response) -> str:
    """Return the code or the message of an error of ours; the last line of one of Serve's."""
    try:
        error = answer.json()["error"]
        return str(error["code"] or error["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text.strip().rsplit("\n", 1)[-1][:LONGEST]


async def client(order: dict[str, Any], number: int, folder: Path, answers: list[dict[str, Any]]) -> None:
    chosen = random.Random(number)
    while not (folder / "stop").exists():
        index, address = chosen.randrange(len(order["asked"])), chosen.choice(order["addresses"])
        began = time.monotonic()
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as connected:
            found = await ask(connected, address, order["asked"][index])
        answers.append({"began": began, "ended": time.monotonic(), "address": address, "prompt": index, **found})
        if "error" in found:
            await asyncio.sleep(PAUSE_S)


async def load(order: dict[str, Any], folder: Path) -> None:
    answers: list[dict[str, Any]] = []
    await asyncio.gather(*(client(order, number, folder, answers) for number in range(order["clients"])))
    (folder / "answers").write_text(json.dumps(answers))


if __name__ == "__main__":
    path = Path(sys.argv[1])
    asyncio.run(load(json.loads(path.read_text()), path.parent))
