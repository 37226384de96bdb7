"""The HTTP server process: connections, guards and limits."""
