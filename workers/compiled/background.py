"""A child process that compiles one model, so that the compiler's time and memory are not this process's."""

import json
import os
import subprocess
import sys

import torch

from protos.config.engine import EngineConfig, to_json
from protos.worker_messages import Allocate

NICE = 19
"""A child that compiles while requests are served gives way to them."""
START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from workers.compiled.child import main; main()"


class Child:
    """Compiles one part of an engine into the store. The process ends with this one.

    Args:
        config: a parsed configuration.
        allocate: the context length and the vocabulary of the engine.
        part: "target" or "draft".
        key: of the entry.
        nice: how far the child gives way to other processes.

    Attributes:
        key: of the entry.
    """

    def __init__(self, config: EngineConfig, allocate: Allocate, part: str, key: str, nice: int = 0) -> None:
        self.key = key
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None
        order = {
            "config": to_json(config),
            "part": part,
            "key": key,
            "nice": nice,
            "parent": os.getpid(),
            "max_model_len": allocate.max_model_len,
            "vocab_size": allocate.vocab_size,
            "threads": torch.get_num_threads(),
            "dynamic_threads": torch._inductor.config.cpp.dynamic_threads,
        }
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.close()

    def has_ended(self) -> bool:
        """Return whether it has ended."""
        return self._process.poll() is not None

    def wait(self) -> str | None:
        """Wait until it has ended; return why it failed, None if it did not."""
        assert self._process.stderr is not None
        lines = self._process.stderr.read().strip().splitlines()
        code = self._process.wait()
        self._process.stderr.close()
        return None if code == 0 else (lines or [f"the compiling process ended with {code}"])[-1]

    def kill(self) -> None:
        """End it, unless it has ended."""
        if not self.has_ended():
            self._process.kill()
            self.wait()
