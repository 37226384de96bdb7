"""Limits of the HTTP server: connections, keys and bodies."""
