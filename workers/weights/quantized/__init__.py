"""Quantised weights as checkpoints store them."""
