"""The `slipstream` command."""
