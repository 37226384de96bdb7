"""Anthropic's Messages API, over the chat path: its requests and answers are translated to those of chat."""
