"""`batch_invariant`: operators whose results do not depend on the batch. `mode` is the only entry."""
