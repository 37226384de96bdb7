"""The engine's configuration, and how it is built from user arguments."""
