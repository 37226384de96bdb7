"""Kernels alone, without an engine."""
