"""The sampling pipeline: logits processors, noise, sampling, log-probabilities."""
