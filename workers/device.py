"""Devices, their memory, and streams of threads other than the forward's."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def set_device(device: torch.device) -> None:
    """Make *device* this thread's own; nothing to do on a CPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Let this thread queue its work on a stream of its own: what it waits for must not hold up the forward."""
    if device.type != "cuda":
        yield
        return
    set_device(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        yield


def mark(device: torch.device) -> torch.cuda.Event | None:
    """Return what another stream can wait for: that everything queued so far is done. None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def finish(device: torch.device) -> None:
    """Wait for this thread's stream: only then may a tensor be given up, or read on another one."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def adopt(tensor: torch.Tensor) -> None:
    """Keep the memory of *tensor*, which another stream has allocated, until this thread's stream is done with it."""
    if tensor.device.type == "cuda":
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def weight_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of all weights, shared ones once."""
    return sum(weight.nbytes for weight in model.parameters())


def free_memory() -> int:
    """Return the bytes of main memory that are free now."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
