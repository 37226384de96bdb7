"""One file a proposer. Each guesses what the target will say; none can change it."""
