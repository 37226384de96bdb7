"""Prometheus metrics and log lines."""
