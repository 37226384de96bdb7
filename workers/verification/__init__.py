"""Acceptance of draft tokens."""
