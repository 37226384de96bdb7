"""Configuration, messages and protocols that all parts use. Imports none of the parts."""
