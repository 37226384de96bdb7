"""Everything that touches tensors: models, paged KV, attention, sampling, verification. Knows no ray."""
