"""Load on any OpenAI-compatible server: `slipstream bench serve`."""
