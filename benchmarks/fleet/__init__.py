"""A simulated fleet of replicas behind a router."""
