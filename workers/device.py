"""Devices, their memory, and streams of threads other than the forward's."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from protos.config.engine import CacheConfig

CPU_CACHE_BYTES = 4 << 30
"""The default KV cache on a CPU takes at most this much memory, as in vLLM."""


def set_device(device: torch.device) -> None:
    """Make *device* this thread's current device; do nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Run this thread's work on a stream of its own, so that it does not delay the forward."""
    if device.type != "cuda":
        yield
        return
    set_device(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        yield


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """Return an event that completes once all work queued so far is done; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


class DeviceTimer:
    """Times what a CUDA device does between `begin` and `end`, which only note points of the current stream."""

    def __init__(self) -> None:
        self._began, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Begin after what was launched so far."""
        self._began.record()

    def end(self) -> None:
        """End after what was launched so far."""
        self._ended.record()

    @property
    def seconds(self) -> float:
        """Of the last time. Read it once the device is done with both points."""
        return float(self._began.elapsed_time(self._ended)) / 1e3


def weight_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of all weights, tied ones once."""
    return sum(weight.nbytes for weight in model.parameters())


def free_memory() -> int:
    """Return the bytes of free main memory."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cache_bytes(cache: CacheConfig, device: torch.device, beside: int = 0) -> int:
    """Return the bytes that the KV caches may take, where steps take *beside* of a CUDA device's memory."""
    if cache.memory_bytes is not None:
        return cache.memory_bytes
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free - (1 - cache.memory_utilization) * total) - beside
    return min(CPU_CACHE_BYTES, int(free_memory() * cache.memory_utilization))
