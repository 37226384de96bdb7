"""A group whose connections may be replaced: the model's modules hold it, and outlive the ranks around them."""

import torch

from workers.distributed.groups import Group


class Unconnected:
    """Ranks that are not connected yet: results have the right shapes and meaningless values.

    A model runs one token when it is loaded, to find the shapes of its layers.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return *tensor*."""
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return *tensor* once for each rank, joined along *dim*."""
        return torch.cat([tensor] * self.size, dim)

    def gather(self, tensor: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """As `all_gather` on rank *dst*; None elsewhere."""
        return self.all_gather(tensor, dim) if self.rank == dst else None

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Return *tensor*."""
        del src
        return tensor

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Send nothing."""

    def recv(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        """Return *tensor*."""
        del src
        return tensor

    @property
    def cpu_group(self) -> Group:
        """This group."""
        return self

    def check(self, done: torch.cuda.Event | None = None) -> None:
        """Nothing to check."""

    def close(self) -> None:
        """Nothing to close."""


class RenewableGroup:
    """A `Group` of rank *rank* of *size*: `Unconnected` until `use`, then the group in use."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._group: Group = Unconnected(rank, size)

    def use(self, group: Group) -> None:
        """Close the group in use, and use *group*, which has the same rank and size."""
        self._group.close()
        self._group = group

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Group`."""
        return self._group.all_reduce(tensor)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """See `Group`."""
        return self._group.all_gather(tensor, dim)

    def gather(self, tensor: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """See `Group`."""
        return self._group.gather(tensor, dst, dim)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """See `Group`."""
        return self._group.broadcast(tensor, src)

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """See `Group`."""
        self._group.send(tensor, dst)

    def recv(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        """See `Group`."""
        return self._group.recv(tensor, src)

    @property
    def cpu_group(self) -> Group:
        """See `Group`."""
        return self._group.cpu_group

    def check(self, done: torch.cuda.Event | None = None) -> None:
        """See `Group`."""
        self._group.check(done)

    def close(self) -> None:
        """See `Group`."""
        self._group.close()
