"""The executor over worker processes: start, watch, replace."""
