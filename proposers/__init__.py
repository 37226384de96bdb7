"""Proposers, one file per method. They draft tokens for the target to verify."""
