"""A simulated fleet of replicas behind a router, and the same with two real replicas."""
