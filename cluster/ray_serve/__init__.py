"""Slipstream as a Ray Serve application."""
