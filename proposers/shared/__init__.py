"""What several proposers have in common."""
