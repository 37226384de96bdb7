"""`python -m benchmarks`, which is also `slipstream bench`: the comparisons with `transformers`."""

from benchmarks.engine import main

main()
