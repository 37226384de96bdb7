"""Measured comparisons. Each runs both sides in one process, in alternating blocks, and writes JSON."""
