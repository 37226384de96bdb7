"""`slipstream bench`: load on any OpenAI-compatible server (`serve`), and methods compared on a model (`compare`)."""
