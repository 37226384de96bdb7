"""Loading a model and running its forward."""
