"""Triton kernels. Importing a module of this package imports triton, which only GPUs and the tests need.

Every function takes device tensors only: it reads nothing on the host, and its grid follows from shapes and static
numbers, so that it may be captured in a CUDA graph.
"""
