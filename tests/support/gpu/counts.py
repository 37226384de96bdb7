"""What a pretended GPU counts, by file and line of the caller."""

import sys
from collections import Counter
from dataclasses import dataclass, field

OWN = ("/workers/", "/proposers/", "/transformers/")


@dataclass
class Counts:
    """What the host asked of the device.

    Attributes:
        kernels: launched one by one, by operator.
        graphs: replayed.
        to_device: copies from the host, by place. A copy from pageable memory is staged by the driver.
        pageable: those of them from memory that is not pinned.
        blocking: those of them that the host waits for.
        to_host: copies to the host, by place.
        syncs: times that the host waits for the device, by place.
    """

    kernels: Counter[str] = field(default_factory=Counter)
    graphs: int = 0
    to_device: Counter[str] = field(default_factory=Counter)
    pageable: Counter[str] = field(default_factory=Counter)
    blocking: Counter[str] = field(default_factory=Counter)
    to_host: Counter[str] = field(default_factory=Counter)
    syncs: Counter[str] = field(default_factory=Counter)

    def budget(self) -> dict[str, int]:
        """Return the totals."""
        return {
            "kernels": self.kernels.total(),
            "graphs": self.graphs,
            "to_device": self.to_device.total(),
            "blocking": self.blocking.total(),
            "to_host": self.to_host.total(),
            "syncs": self.syncs.total(),
        }


def where() -> str:
    """Return the innermost line of the engine, or of `transformers`, that is running."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        for part in OWN:
            if part in name:
                return f"{name[name.rindex(part) + 1 :]}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "elsewhere"
