"""The target as its own draft, over a window of its KV cache (MagicDec, arXiv 2408.11049; TriForce, 2404.11912).

It drafts as `draft_model` does. What is special is the model: see `workers.draft.load.TargetDraft`.
"""

from typing import ClassVar

from proposers.draft_model import DraftModelProposer


class SelfWindowProposer(DraftModelProposer):
    """Drafts chains or trees with the target's own weights."""

    method: ClassVar[str] = "self_window"
