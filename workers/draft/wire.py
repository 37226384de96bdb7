"""Drafts as tables of int32: across the pair from the draft to target 0, and from target 0 to the other ranks.

A node's *link* is `2 * (parent + 1)`, and 1 more for a probe. Where all drafts of a round are chains no links travel.
Behind them there may be laws, as many as a row may have nodes: ids of all, then the bits of float32 probabilities.
"""

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
import torch

from protos.draft import NO_DRAFT, Draft
from protos.messages import Row
from workers.distributed.groups import Group
from workers.slots import SlotTable
from workers.verification.draft_probs import DRAFT_PROBS_SIZE, NO_DRAFT_PROBS, DraftProbs, DraftProbsBySlot, families

Ids = npt.NDArray[np.int32]

STAMP = 3
"""Columns before the ids: base length, generation, count."""
GENERATION = 0x7FFFFFFF


def encode(slots: SlotTable, rows: Seq[Row], drafts: Seq[Draft], laws: DraftProbsBySlot = NO_DRAFT_PROBS) -> Ids:
    """Return what crosses the pair: each row's base length, generation, count, ids, links if there is a tree, and laws.

    int32, `[R, 3 + K]` where all are chains, else `[R, 3 + 2 * K]`; K is the most nodes that a row may have. With laws
    of L ids it is `2 * L * K` wider, so that the width alone tells what there is.
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
    return np.concatenate((table, _law_columns(rows, laws, width)), 1) if laws else table


def _law_columns(rows: Seq[Row], laws: DraftProbsBySlot, width: int) -> Ids:
    """Return the laws of rows as int32 `[R, 2 * K * L]`; L is what the longest of them needs."""
    size = max(1, *(int((found.q_ML > 0).sum(1).max(initial=0)) for found in laws.values()))
    ids_RKL = np.zeros((len(rows), width, size), np.int32)
    q_RKL = np.zeros((len(rows), width, size), np.float32)
    for r, row in enumerate(rows):
        if row.slot in laws:  # a law falls: its first ids are those that have a probability
            found = laws[row.slot]
            ids_RKL[r, : len(found.ids_ML), : found.ids_ML.shape[1]] = found.ids_ML[:, :size]
            q_RKL[r, : len(found.q_ML), : found.q_ML.shape[1]] = found.q_ML[:, :size]
    return np.concatenate([part.reshape(len(rows), -1) for part in (ids_RKL, q_RKL.view(np.int32))], 1)


def decode(slots: SlotTable, rows: Seq[Row], table: Ids, vocab_size: int, law_size: int = 0) -> list[Draft]:
    """Return each row's draft; an empty one where it extends another text than ours, or makes no sense.

    *law_size* is how many ids a law may have; 0 where none are to come.
    """
    width, shares = _shares(rows, table, law_size)
    if not shares:
        return [NO_DRAFT] * len(rows)
    links_end = STAMP + (2 - shares % 2) * width
    ids, links = table[:, STAMP : STAMP + width].tolist(), table[:, STAMP + width : links_end].tolist()
    return [
        _draft(ids[r], links[r], max(0, count)).valid_prefix(row.k, vocab_size)
        if _is_ours(slots, row, *stamp)
        else NO_DRAFT
        for r, (row, (*stamp, count)) in enumerate(zip(rows, table[:, :STAMP].tolist(), strict=True))
    ]


def laws_in(rows: Seq[Row], drafts: Seq[Draft], table: Ids) -> DraftProbsBySlot:
    """Return the laws that came with *drafts*, by slot, as they were told: whether they make sense is for the judge."""
    width, shares = _shares(rows, table, DRAFT_PROBS_SIZE)
    size = (shares - 1) // 2
    if size < 1:
        return NO_DRAFT_PROBS
    first = STAMP + (2 - shares % 2) * width
    ids_RKL = table[:, first : first + width * size].reshape(len(rows), width, size).astype(np.int64)
    bits_RKL = np.ascontiguousarray(table[:, first + width * size :]).reshape(len(rows), width, size)
    return {
        row.slot: DraftProbs(ids_RKL[r, :count], bits_RKL[r, :count].view(np.float32))
        for r, (row, draft) in enumerate(zip(rows, drafts, strict=True))
        if (count := len(families(draft)))
    }


def _shares(rows: Seq[Row], table: Ids, law_size: int) -> tuple[int, int]:
    """Return how many ids a row may have, K, and how many columns a table has for each; 0 where it makes no sense.

    There is one for the id, another for the link if that makes them even, and two for each id of a law.
    """
    width = max(row.k for row in rows)
    shares, rest = divmod(table.shape[1] - STAMP, width)
    makes_sense = len(table) == len(rows) and rest == 0 and 1 <= shares <= 2 + 2 * law_size
    return width, shares if makes_sense else 0


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
    return [
        _draft(ids, line if count < 0 else (), abs(count)) for (count, *ids), line in zip(told, linked, strict=True)
    ]


def _links(draft: Draft) -> list[int]:
    probes = draft.probes or (False,) * len(draft)
    return [2 * (parent + 1) + probe for parent, probe in zip(draft.node_parents(), probes, strict=True)]


def _draft(ids: Seq[int], links: Seq[int], count: int) -> Draft:
    """Return the draft of *count* nodes; a chain where there are no links."""
    own = links[:count]
    probes = tuple(bool(link & 1) for link in own)
    return Draft(tuple(ids[:count]), tuple((link >> 1) - 1 for link in own), probes if any(probes) else ())


def _padded(numbers: Seq[int], width: int) -> list[int]:
    return [*numbers, *([0] * (width - len(numbers)))]
