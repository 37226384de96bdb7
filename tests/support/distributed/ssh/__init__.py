"""Stand-ins for OpenSSH's server and rsync, where they are not installed."""
