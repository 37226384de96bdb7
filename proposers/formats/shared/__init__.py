"""Shared by several checkpoint formats."""
