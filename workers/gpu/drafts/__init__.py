"""Drafts inside graphs: chains and trees, made on the device without reading it between their steps."""
