"""`python -m benchmarks.policies`."""

from benchmarks.policies import main

main()
