"""Tool calls: how they are requested, and how they are parsed."""
