"""The engine's configuration, and how user arguments become one."""
