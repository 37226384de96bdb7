"""What several checkpoint formats have in common."""
