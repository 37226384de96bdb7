"""Published checkpoints: their configs, and the names and shapes of their tensors."""
