"""The step on a GPU: attention, sampling and acceptance as kernels over device tensors."""
