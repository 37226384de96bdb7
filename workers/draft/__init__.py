"""The draft worker and its channel to target rank 0."""
