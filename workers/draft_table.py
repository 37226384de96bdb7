"""Drafts as tables of int32: across the pair from the draft to target 0, and from target 0 to the other ranks.

A node's *link* is `2 * (parent + 1)`, and 1 more for a probe. Where all drafts of a round are chains no links travel.
"""

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
import torch

from protos.drafts import NO_DRAFT, parents_of, sane
from protos.messages import Draft, Row
from workers.groups import Group
from workers.slots import SlotTable

Ids = npt.NDArray[np.int32]

STAMP = 3
"""Columns before the ids: base length, generation, count."""
GENERATION = 0x7FFFFFFF


def encode(slots: SlotTable, rows: Seq[Row], drafts: Seq[Draft]) -> Ids:
    """Return what crosses the pair: each row's base length, generation, count, ids and, if there is a tree, links.

    int32, `[R, 3 + K]` where all are chains, else `[R, 3 + 2 * K]`; K is the most nodes that a row may have.
    """
    width = max(row.k for row in rows)
    has_links = not all(draft.is_chain for draft in drafts)
    table = np.zeros((len(rows), STAMP + width * (1 + has_links)), np.int32)
    for line, row, draft in zip(table, rows, drafts, strict=True):
        count = len(draft)
        line[:STAMP] = slots.known_len[row.slot], slots.joined[row.slot] & GENERATION, count
        line[STAMP : STAMP + count] = draft.tokens
        if has_links:
            line[STAMP + width : STAMP + width + count] = _links(draft)
    return table


def decode(slots: SlotTable, rows: Seq[Row], table: Ids, vocab_size: int) -> list[Draft]:
    """Return each row's draft; an empty one where it extends another text than ours, or makes no sense."""
    width = max(row.k for row in rows)
    if len(table) != len(rows) or table.shape[1] not in {STAMP + width, STAMP + 2 * width}:
        return [NO_DRAFT] * len(rows)
    ids, links = table[:, STAMP : STAMP + width].tolist(), table[:, STAMP + width :].tolist()
    return [
        sane(_draft(ids[r], links[r], max(0, count)), row.k, vocab_size) if _is_ours(slots, row, *stamp) else NO_DRAFT
        for r, (row, (*stamp, count)) in enumerate(zip(rows, table[:, :STAMP].tolist(), strict=True))
    ]


def _is_ours(slots: SlotTable, row: Row, base_len: int, generation: int) -> bool:
    """Whether a draft extends the text that we know."""
    return base_len == int(slots.known_len[row.slot]) and generation == int(slots.joined[row.slot]) & GENERATION


def agree(group: Group, rows: Seq[Row], drafts: Seq[Draft], device: torch.device) -> list[Draft]:
    """Return, on all ranks of *group*, the drafts that rank 0 has.

    Counts and ids of all rows are broadcast, int32 `[R, 1 + K]`; a tree's count is negative, and where there is one,
    all ranks know that links follow, `[R, K]`.
    """
    width = max(row.k for row in rows)
    lines = [[len(draft) if draft.is_chain else -len(draft), *_padded(draft.tokens, width)] for draft in drafts]
    told = group.broadcast(torch.tensor(lines, dtype=torch.int32, device=device)).tolist()
    counts = [line[0] for line in told]
    if all(count >= 0 for count in counts):
        return [Draft(tuple(ids[:count])) for count, *ids in told]
    links = torch.tensor([_padded(_links(draft), width) for draft in drafts], dtype=torch.int32, device=device)
    linked = group.broadcast(links).tolist()
    return [_draft(ids, line if count < 0 else (), abs(count))
            for (count, *ids), line in zip(told, linked, strict=True)]


def _links(draft: Draft) -> list[int]:
    probes = draft.probes or (False,) * len(draft)
    return [2 * (parent + 1) + probe for parent, probe in zip(parents_of(draft), probes, strict=True)]


def _draft(ids: Seq[int], links: Seq[int], count: int) -> Draft:
    """Return the draft of *count* nodes; a chain where there are no links."""
    own = links[:count]
    probes = tuple(bool(link & 1) for link in own)
    return Draft(tuple(ids[:count]), tuple((link >> 1) - 1 for link in own), probes if any(probes) else ())


def _padded(numbers: Seq[int], width: int) -> list[int]:
    return [*numbers, *([0] * (width - len(numbers)))]
