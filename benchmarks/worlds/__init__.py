"""Simulated worlds for speculation policies: engines whose costs, text, load and noise are known."""
