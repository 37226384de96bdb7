"""`slipstream simulate`: drafts studied against logged answers."""
