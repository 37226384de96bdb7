"""Sequences, blocks, scheduling, the controller loop and the front ends. Knows neither torch nor ray."""
