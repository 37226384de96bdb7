"""The engine on Ray: actors, placement groups and the channel to the controller."""
