"""`batch_invariant`: kernels whose results do not depend on the batch."""
