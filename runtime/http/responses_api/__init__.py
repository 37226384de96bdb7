"""OpenAI's Responses API, without stored state: a translation of conversations."""
