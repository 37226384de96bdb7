"""Linear layers whose weights stay quantised in memory."""
