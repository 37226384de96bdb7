"""Text of tokens, for tests."""
