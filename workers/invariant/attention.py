"""Batch-invariant paged attention on CPUs (`native/invariant_attention.cpp`)."""

from workers.attention.native import NativeAttention
from workers.native.build import NO_CONTRACTION, load_function


class InvariantAttention(NativeAttention):
    """Runs every row through a kernel whose results depend only on a query and the keys it attends to."""

    LONGEST = 1 << 62
    KERNEL = ("invariant_attention", "slipstream_invariant_attention", NO_CONTRACTION)

    @classmethod
    def check_available(cls) -> None:
        """Build the kernel. Raises `KernelUnavailableError` if that fails."""
        load_function(*cls.KERNEL)
