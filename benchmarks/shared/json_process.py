"""A child process that is sent commands and answers them, one line of JSON each."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO, Any

from workers.threads import USER_VARIABLES


class JsonProcess:
    """A child process; it answers once when it has started, and then every command.

    Args:
        name: of what runs in it, for errors.
        command: the program and its arguments.
        variables: of the environment, in addition to this process's without the numbers of threads in it.
    """

    def __init__(self, name: str, command: Sequence[str], variables: Mapping[str, str]) -> None:
        kept = {key: value for key, value in os.environ.items() if key not in USER_VARIABLES}
        self._name = name
        self._process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**kept, **variables}
        )
        self.pid = self._process.pid

    def await_start(self) -> Any:
        """Wait for the first answer, and return it. Call it once, before `ask`.

        Raises:
            RuntimeError: the process ended.
        """
        return self._read()

    def ask(self, command: Mapping[str, Any]) -> Any:
        """Return the answer to *command*.

        Raises:
            RuntimeError: the process ended.
        """
        print(json.dumps(command), file=self._end(self._process.stdin), flush=True)
        return self._read()

    def _read(self) -> Any:
        line = self._end(self._process.stdout).readline()
        if not line:
            raise RuntimeError(f"the process of {self._name} ended: {self._process.wait()}")
        return json.loads(line)

    @staticmethod
    def _end(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None, "both pipes were asked for"
        return pipe

    def close(self) -> None:
        """End the process."""
        self._end(self._process.stdin).close()
        self._process.wait()
        self._end(self._process.stdout).close()
