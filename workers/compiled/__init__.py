"""Models compiled ahead of time: once per model and machine, in a process of its own."""
