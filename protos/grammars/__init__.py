"""Processes that compile and follow grammars, for frontends and targets."""
