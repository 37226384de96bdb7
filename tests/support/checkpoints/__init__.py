"""Published checkpoints: their configs, and the names, dtypes and shapes of their tensors."""
