"""`slipstream check`: whether speculation changes the output of a model pair."""
