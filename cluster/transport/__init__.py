"""Processes and the ZMQ sockets between them."""
