"""Builds engines, places them on machines, and serves them: the command line, the servers, and (lazily) Ray."""
