"""Speculation policies: how many draft tokens each row gets."""
