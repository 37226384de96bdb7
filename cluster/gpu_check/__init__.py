"""Checks and measures an engine on GPUs, without Ray: `slipstream doctor --gpu`, `make accept-gpu`."""
