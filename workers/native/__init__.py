"""C++ kernels for CPUs."""
