"""A GPU that is pretended on a CPU: counts kernels, copies and synchronisations of the real engine.

Not shown this way: order between streams, whether CUDA accepts a capture, rounding of tensor cores, NCCL, and speed.
"""
