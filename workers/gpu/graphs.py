"""CUDA graphs: a fixed sequence of kernels over fixed memory, launched as one.

A *program* is a function without arguments that reads and writes static buffers. It is run once, so that everything it
loads is there, and then captured. The graphs of one engine share a pool of memory: they run one after another.

All ranks of a target capture the same programs in the same order, operations between ranks included, and NCCL demands
that they launch the graphs of the same capture together. So a program has a graph on all ranks or on none.
"""

import logging
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, Protocol, TypeVar

import torch

from protos.progress import ProgressCallback
from workers.distributed.groups import Group, GroupError, count_true, first_line

logger = logging.getLogger(__name__)

Program = Callable[[], None]
Key = TypeVar("Key", bound=Hashable)
MIB = 1 << 20


class GraphCaptureError(Exception):
    """A program cannot be captured; the message is one line."""


class CapturedGraph(Protocol):
    """A captured program."""

    def replay(self) -> None:
        """Launch it on the current stream."""
        ...


class GraphCapturer:
    """Captures programs on a stream of its own. Other threads may use the device meanwhile.

    Args:
        device: a CUDA device.
        group: the ranks that capture the same programs at once.
    """

    def __init__(self, device: torch.device, group: Group) -> None:
        self._device, self._group = device, group
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, program: Program) -> CapturedGraph:
        """Run *program*, then capture it.

        Raises:
            GraphCaptureError: it cannot be captured on all ranks.
            GroupError: it cannot be run on some ranks, for whose tensors the others wait.
        """
        graph = torch.cuda.CUDAGraph()
        failed, why = self._attempt(lambda: self._run(program))
        if 0 < failed < self._group.size:
            raise GroupError(f"a step fails on {failed} of {self._group.size} ranks, for which the others wait: {why}")
        if not failed:
            self._group.check()
            failed, why = self._attempt(lambda: self._record(graph, program))
        if failed:
            raise GraphCaptureError(why)
        return graph

    def _attempt(self, step: Callable[[], None]) -> tuple[int, str]:
        """Take a step on all ranks; return on how many it fails, and why."""
        why = ""
        try:
            with torch.inference_mode():
                step()
        except RuntimeError as error:
            why = f"{type(error).__name__}: {first_line(error)[:200]}"
        # The hosts tell each other: devices may wait for what a rank whose step failed did not begin.
        return count_true(self._group.cpu_group, bool(why)), why or "it fails on another rank"

    def _record(self, graph: torch.cuda.CUDAGraph, program: Program) -> None:
        # Thread-local: what other threads do (a draft channel, checkpoints that load) does not end the capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            program()

    def free_bytes(self) -> int:
        """Return the free memory of the device."""
        return torch.cuda.mem_get_info(self._device)[0]

    def _run(self, program: Program) -> None:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            program()
        current.wait_stream(self._stream)


class GraphSet(Generic[Key]):
    """The graphs of one kind of step, by size.

    Args:
        name: what they run, for messages.
        capturer: shared by all sets of an engine.
    """

    def __init__(self, name: str, capturer: GraphCapturer) -> None:
        self._name, self._capturer = name, capturer
        self._graphs: dict[Key, CapturedGraph] = {}
        self._programs: dict[Key, Program] = {}  # they own tensors that graphs read

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: Key) -> bool:
        return key in self._graphs

    def capture(
        self, programs: Mapping[Key, Program], prepare: Callable[[Key], None], report: ProgressCallback
    ) -> None:
        """Capture *programs*, in their order: the largest first, whose memory the others use again.

        After one that cannot be captured no other is: what has no graph runs as without graphs. One line says so.

        Args:
            programs: by key.
            prepare: called before each, writes input that it can run with.
            report: called with the number of graphs, and the time and memory that they took.
        """
        started, before = time.monotonic(), self._capturer.free_bytes()
        failure = self._capture(programs, prepare)
        count = f"{len(self)} CUDA graphs"
        if failure is not None:
            logger.warning("%s: only %s of %d, the rest runs eager: %s", self._name, count, len(programs), failure)
        used = max(0, before - self._capturer.free_bytes()) / MIB
        report(f"{self._name}: {count} in {time.monotonic() - started:.1f} s, {used:.0f} MiB")

    def _capture(self, programs: Mapping[Key, Program], prepare: Callable[[Key], None]) -> GraphCaptureError | None:
        """Capture programs until one fails; return why it did."""
        for key, program in programs.items():
            prepare(key)
            try:
                self._graphs[key] = self._capturer.capture(program)
            except GraphCaptureError as error:
                return error
            self._programs[key] = program
        return None

    def launch(self, key: Key) -> None:
        """Launch the graph of *key*, which is there."""
        self._graphs[key].replay()
