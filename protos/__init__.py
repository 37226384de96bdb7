"""The words all parts speak: configuration, messages, protocols. Knows nothing of the parts."""
