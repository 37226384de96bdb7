"""The adaptive policy measured: see `benchmarks.policies.__main__`."""
