"""`python -m benchmarks.commits`."""

from benchmarks.commits import main

main()
