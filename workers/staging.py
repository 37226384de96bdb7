"""Copies tensors from a device to host memory, without delaying the forward."""

import torch

from protos.errors import SlipstreamError


class StagingError(SlipstreamError, RuntimeError):
    """There is no memory to stage a tensor in."""


class HostStaging:
    """Copies tensors of *device* into pinned host memory, one after another. Used by one thread, on its own stream.

    The thread waits for the copy, so for what computes the tensor, and for nothing else. On a CPU nothing is copied.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_needed = device.type != "cpu"
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def to_host(self, states_NF: torch.Tensor, is_computed: torch.cuda.Event | None = None) -> torch.Tensor:
        """Return `states_NF` in host memory, valid until the next call.

        Args:
            states_NF: contiguous, on the device.
            is_computed: an event after which it is computed; None: it is already.

        Raises:
            StagingError: there is too little memory.
        """
        if not self._is_needed:
            return states_NF
        try:
            host_NF = self._room(states_NF.nbytes).view(states_NF.dtype).view(states_NF.shape)
            self._copy(states_NF, host_NF, is_computed)
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise StagingError(f"no memory to stage {states_NF.nbytes} bytes: {error}") from error
        return host_NF

    def _room(self, num_bytes: int) -> torch.Tensor:
        """Return *num_bytes* of the buffer, which grows to the largest tensor so far."""
        if len(self._buffer) < num_bytes:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # freed before the larger one is allocated
            self._buffer = self._allocate(num_bytes)
        return self._buffer[:num_bytes]

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def _copy(self, states_NF: torch.Tensor, host_NF: torch.Tensor, is_computed: torch.cuda.Event | None) -> None:
        stream = torch.cuda.current_stream(states_NF.device)
        if is_computed is not None:
            stream.wait_event(is_computed)
        host_NF.copy_(states_NF, non_blocking=True)
        stream.synchronize()
