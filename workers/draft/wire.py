"""Drafts as tables of int32: sent from the draft worker to target rank 0 in a message, and broadcast from there.

A node's *link* is `2 * (parent + 1)`, and 1 more for a probe. If all drafts of a round are chains, there are no links.
After them come the draft probabilities, if any: K distributions for each row, first the ids of all, then the
probabilities as the bits of float32.
"""

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
import torch

from protos.draft import NO_DRAFT, Draft
from protos.messages import Row
from protos.worker_messages import Drafted
from workers.distributed.groups import Group
from workers.draft_messages import DraftTable
from workers.slots import SlotTable
from workers.verification.draft_probs import (
    DRAFT_PROBS_SIZE,
    NO_DRAFT_PROBS,
    DraftProbs,
    DraftProbsBySlot,
    children_by_parent,
)

Ids = npt.NDArray[np.int32]

STAMP = 3
"""Columns before the ids: base length, generation, count."""
GENERATION = 0x7FFFFFFF
ID = np.dtype("<i4")
OTHER_BYTES = 1024
"""More than a message takes beside its table, encryption included."""


def encode(slots: SlotTable, rows: Seq[Row], drafts: Seq[Draft], probs: DraftProbsBySlot = NO_DRAFT_PROBS) -> Ids:
    """Return the table that the draft worker sends: base length, generation, count, ids, links if any, probabilities.

    int32, `[R, 3 + K]` if all drafts are chains, else `[R, 3 + 2 * K]`; K is the most nodes that a row may have. With
    distributions of L ids it is `2 * L * K` wider, so the width alone determines the layout.
    """
    width = max(row.k for row in rows)
    has_links = not all(draft.is_chain for draft in drafts)
    table = np.zeros((len(rows), STAMP + width * (1 + has_links)), np.int32)
    for line, row, draft in zip(table, rows, drafts, strict=True):
        count = len(draft)
        line[:STAMP] = slots.known_len[row.slot], slots.generation[row.slot] & GENERATION, count
        line[STAMP : STAMP + count] = draft.tokens
        if has_links:
            line[STAMP + width : STAMP + width + count] = _links(draft)
    return np.concatenate((table, _probs_columns(rows, probs, width)), 1) if probs else table


def pack(table: Ids, drafted: Drafted) -> DraftTable:
    """Return the message that carries *table*, int32 `[R, W]`."""
    return DraftTable(drafted, len(table), table.shape[1], table.astype(ID, copy=False).tobytes())


def unpack(message: DraftTable) -> Ids:
    """Return the table of a message, int32 `[R, W]`, read-only. Raises `ValueError` if it has another size."""
    rows, width = message.rows, message.width
    if min(rows, width) < 1 or len(message.ids) != rows * width * ID.itemsize:
        raise ValueError(
            f"a draft table of round {message.drafted.round} has {len(message.ids)} bytes; {rows} rows of {width} "
            f"ids take {rows * width * ID.itemsize}"
        )
    return np.frombuffer(message.ids, ID).reshape(rows, width).astype(np.int32, copy=False)


def most_bytes(num_rows: int, num_nodes: int, probs_size: int = 0) -> int:
    """Return the most bytes of a message with drafts of *num_nodes* nodes for each of *num_rows* rows."""
    return num_rows * (STAMP + num_nodes * (2 + 2 * probs_size)) * ID.itemsize + OTHER_BYTES


def _probs_columns(rows: Seq[Row], probs: DraftProbsBySlot, width: int) -> Ids:
    """Return the distributions of rows as int32 `[R, 2 * K * L]`; L is the length of the longest."""
    size = max(1, *(int((found.q_ML > 0).sum(1).max(initial=0)) for found in probs.values()))
    ids_RKL = np.zeros((len(rows), width, size), np.int32)
    q_RKL = np.zeros((len(rows), width, size), np.float32)
    for r, row in enumerate(rows):
        if row.slot in probs:  # in descending order: the first ids are those with a probability
            found = probs[row.slot]
            ids_RKL[r, : len(found.ids_ML), : found.ids_ML.shape[1]] = found.ids_ML[:, :size]
            q_RKL[r, : len(found.q_ML), : found.q_ML.shape[1]] = found.q_ML[:, :size]
    return np.concatenate([part.reshape(len(rows), -1) for part in (ids_RKL, q_RKL.view(np.int32))], 1)


def decode(slots: SlotTable, rows: Seq[Row], table: Ids, vocab_size: int, probs_size: int = 0) -> list[Draft]:
    """Return each row's draft; an empty one if it extends another text than the slot's, or is invalid.

    *probs_size* is the most ids of a distribution; 0 where none are expected.
    """
    width, shares = _columns_per_node(rows, table, probs_size)
    if not shares:
        return [NO_DRAFT] * len(rows)
    links_end = STAMP + (2 - shares % 2) * width
    ids, links = table[:, STAMP : STAMP + width].tolist(), table[:, STAMP + width : links_end].tolist()
    return [
        _draft(ids[r], links[r], max(0, count)).valid_prefix(row.k, vocab_size)
        if _extends(slots, row, *stamp)
        else NO_DRAFT
        for r, (row, (*stamp, count)) in enumerate(zip(rows, table[:, :STAMP].tolist(), strict=True))
    ]


def decode_probs(rows: Seq[Row], drafts: Seq[Draft], table: Ids) -> DraftProbsBySlot:
    """Return the distributions of *drafts*, by slot. The acceptance rule checks them."""
    width, shares = _columns_per_node(rows, table, DRAFT_PROBS_SIZE)
    size = (shares - 1) // 2
    if size < 1:
        return NO_DRAFT_PROBS
    first = STAMP + (2 - shares % 2) * width
    ids_RKL = table[:, first : first + width * size].reshape(len(rows), width, size).astype(np.int64)
    bits_RKL = np.ascontiguousarray(table[:, first + width * size :]).reshape(len(rows), width, size)
    return {
        row.slot: DraftProbs(ids_RKL[r, :count], bits_RKL[r, :count].view(np.float32))
        for r, (row, draft) in enumerate(zip(rows, drafts, strict=True))
        if (count := len(children_by_parent(draft)))
    }


def _columns_per_node(rows: Seq[Row], table: Ids, probs_size: int) -> tuple[int, int]:
    """Return K, and how many columns the table has for each of K nodes; 0 if it is invalid.

    There is one for the id, another for the link if that makes them even, and two for each id of a distribution.
    """
    width = max(row.k for row in rows)
    shares, rest = divmod(table.shape[1] - STAMP, width)
    is_valid = len(table) == len(rows) and rest == 0 and 1 <= shares <= 2 + 2 * probs_size
    return width, shares if is_valid else 0


def _extends(slots: SlotTable, row: Row, base_len: int, generation: int) -> bool:
    """Whether a draft extends the text in the slot."""
    return base_len == int(slots.known_len[row.slot]) and generation == int(slots.generation[row.slot]) & GENERATION


def broadcast_drafts(group: Group, rows: Seq[Row], drafts: Seq[Draft]) -> list[Draft]:
    """Return, on all ranks of *group*, the drafts that rank 0 has. They stay on the host, where a round is planned.

    Counts and ids of all rows are broadcast, int32 `[R, 1 + K]`; a tree's count is negative. If there is a tree, the
    links follow, `[R, K]`.
    """
    width = max(row.k for row in rows)
    lines = [[len(draft) if draft.is_chain else -len(draft), *_padded(draft.tokens, width)] for draft in drafts]
    received = group.broadcast(torch.tensor(lines, dtype=torch.int32)).tolist()
    counts = [line[0] for line in received]
    if all(count >= 0 for count in counts):
        return [Draft(tuple(ids[:count])) for count, *ids in received]
    links = torch.tensor([_padded(_links(draft), width) for draft in drafts], dtype=torch.int32)
    linked = group.broadcast(links).tolist()
    return [
        _draft(ids, line if count < 0 else (), abs(count)) for (count, *ids), line in zip(received, linked, strict=True)
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
