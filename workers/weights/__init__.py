"""Reading and partitioning checkpoint weights."""
