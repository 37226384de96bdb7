"""The executor over worker processes: starts, watches and replaces them."""
