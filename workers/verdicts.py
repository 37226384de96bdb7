"""What is added to the verdicts of trees."""

import msgspec

from protos.draft import Draft
from protos.messages import Verdict


def with_tree(verdict: Verdict, draft: Draft) -> Verdict:
    """Add the fields that only verdicts of trees have."""
    if draft.is_chain:
        return verdict
    widths = draft.widths()
    return msgspec.structs.replace(verdict, proposed=sum(widths), widths=widths)
