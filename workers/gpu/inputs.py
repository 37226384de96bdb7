"""The input of a round on the device: what the host writes, in numpy, for all rows at once."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from protos.draft import Draft
from workers.attention.batch import Words
from workers.gpu import choosing
from workers.gpu.metadata import DeviceMetadata
from workers.gpu.round_rows import RoundRows
from workers.gpu.sizes import LINE, Size
from workers.gpu.staging import Array, Layout, ResultArea, StagingArea, fill
from workers.gpu.token_counts import TokenCounts
from workers.sampling.noise import row_keys
from workers.sampling.sample import DeviceLimits, Ints
from workers.slots import SlotTable


@dataclass(frozen=True)
class InputRoom:
    """What the input of every size has room for.

    Attributes:
        blocks: of a row's block table.
        known: the last known tokens of each row, the newest one last, for the draft.
        moves: moves of K and V for each row.
        uncounted: known tokens of a row that are new to its token counts, and one that the device writes.
    """

    blocks: int
    known: int
    moves: int
    uncounted: int


def layout(size: Size, room: InputRoom) -> Layout:
    """Return where the input of rounds of *size* lies."""
    rows, tokens = size.rows, (size.rows, size.queries)
    return Layout(
        {
            "tokens_RQ": ("i8", tokens),
            "follows_R": ("i8", (rows,)),
            "positions_RQ": ("i8", tokens),
            "cache_index_RQ": ("i8", tokens),
            "keys_RQ": ("i8", tokens),
            "parents_RQ": ("i8", tokens),
            "visible_TW": ("i8", (rows * size.queries, 1)),
            "slots_R": ("i8", (rows,)),
            "known_RC": ("i8", (rows, room.known)),
            "moves_2M": ("i8", (2, rows * room.moves)),
            "top_k_R": ("i8", (rows,)),
            "top_p_R": ("f8", (rows,)),
            "min_p_R": ("f8", (rows,)),
            "temperature_R": ("f4", (rows,)),
            "repetition_R": ("f4", (rows,)),
            "presence_R": ("f4", (rows,)),
            "frequency_R": ("f4", (rows,)),
            "uncounted_RC": ("i8", (rows, room.uncounted)),
            "rows_RQ": ("i4", tokens),
            "starts_R": ("i4", (rows,)),
            "lengths_R": ("i4", (rows,)),
            "first_R": ("i4", (rows,)),
            "sizes_R": ("i4", (rows,)),
            "tree_positions_RQ": ("i4", tokens),
            "drafted_R": ("i4", (rows,)),
            "lacking_R": ("i4", (rows,)),
            "levels_R": ("i4", (rows,)),
            "widths_R": ("i4", (rows,)),
            "columns_R": ("i4", (rows,)),
            "lowest_R": ("i4", (rows,)),
            "tables_RB": ("i4", (rows, room.blocks)),
        }
    )


class RoundInputs:
    """The input of rounds of one size: views of the staging area's mirrors, and of the area on the device.

    Args:
        size: rows and tokens of each.
        slots: the sequences.
        staging: large enough for the layout.
        room: as for `layout`.
        counts: of the sequences' tokens; None where nothing applies penalties.
        results: of the rounds.

    Attributes:
        block_size: tokens of a KV block.
        counts: as given.
        on_device: the arrays on the device, by name; `layout` has their dtypes and shapes.
    """

    def __init__(
        self,
        size: Size,
        slots: SlotTable,
        staging: StagingArea,
        room: InputRoom,
        *,
        counts: TokenCounts | None,
        results: ResultArea,
    ) -> None:
        self.size, self.counts, self._slots, self._staging, self._results = size, counts, slots, staging, results
        self.block_size = slots.block_size
        places = layout(size, room)
        self._num_bytes = places.size
        self._mirrors = [places.arrays(mirror.numpy()) for mirror in staging.mirrors]
        self.on_device = places.tensors(staging.on_device)
        self._queries_Q = np.arange(size.queries)
        self._rows_R1 = np.arange(size.rows, dtype=np.int32)[:, None]
        self._back_C = np.arange(1 - room.known, 1)
        device = staging.on_device.device
        self._nothing_R = torch.zeros(size.rows, dtype=torch.int32, device=device)
        self._offsets_R = torch.arange(0, size.rows * size.queries, size.queries, dtype=torch.int32, device=device)

    @property
    def most_moves(self) -> int:
        """How many moves of K and V there is room for."""
        return self.on_device["moves_2M"].shape[1]

    def send(self, rows: RoundRows) -> None:
        """Write *rows* and copy them to the device; the host does not wait."""
        mirror = self._staging.next_mirror()
        self._write(self._mirrors[mirror], rows)
        self._staging.send(mirror, self._num_bytes)

    def _write(self, into: dict[str, Array], rows: RoundRows) -> None:
        slots, slots_R, num_rows = self._slots, rows.slots_R, len(rows.slots_R)
        draft = rows.draft
        lengths_R = draft.drafted_R + 1
        starts_R = slots.known_len[slots_R] - (rows.follows_R is None)
        places_RQ = np.minimum(starts_R[:, None] + self._queries_Q, slots.tokens.shape[1] - 1)
        is_fed_RQ = self._queries_Q < lengths_R[:, None]
        known_RC = np.maximum(starts_R[:, None] + self._back_C, 0)
        fill(into["tokens_RQ"], slots.tokens[slots_R[:, None], places_RQ], 0)
        into["follows_R"][:] = self._results.nothing
        if rows.follows_R is not None:
            into["tokens_RQ"][:num_rows, 0], into["follows_R"][:num_rows] = 0, rows.follows_R
        fill(into["positions_RQ"], places_RQ * is_fed_RQ, 0)
        fill(into["parents_RQ"], np.broadcast_to(np.maximum(self._queries_Q - 1, 0), places_RQ.shape), 0)
        fill(into["cache_index_RQ"], np.where(is_fed_RQ, self._cache_index(slots_R[:, None], places_RQ), -1), -1)
        fill(into["rows_RQ"], np.where(is_fed_RQ, self._rows_R1[:num_rows], -1), -1)
        fill(into["known_RC"], slots.tokens[slots_R[:, None], known_RC], 0)
        fill(into["starts_R"], starts_R, 0)
        fill(into["lengths_R"], lengths_R, 0)
        fill(into["first_R"], starts_R + lengths_R, 0)
        fill(into["sizes_R"], np.zeros_like(lengths_R), 0)
        fill(into["drafted_R"], draft.drafted_R, 0)
        fill(into["lacking_R"], draft.lacking_R, 0)
        fill(into["levels_R"], draft.levels_R, 0)
        fill(into["widths_R"], draft.widths_R, 0)
        fill(into["columns_R"], draft.columns_R, 0)
        fill(into["lowest_R"], draft.lowest_R, 0)
        fill(into["slots_R"], slots_R, len(slots.known_len))
        fill(into["tables_RB"], slots.blocks[slots_R], 0)
        fill(into["temperature_R"], rows.limits.temperature, 0.0)
        fill(into["top_k_R"], rows.limits.top_k, 0)
        fill(into["top_p_R"], rows.limits.top_p, 1.0)
        fill(into["min_p_R"], rows.limits.min_p, 0.0)
        if self.counts is not None:
            self._write_penalties(into, rows, self.counts)
        into["moves_2M"][:] = rows.moves_M2[0][:, None] if len(rows.moves_M2) else 0  # the graph repeats one move
        into["moves_2M"][:, : len(rows.moves_M2)] = rows.moves_M2.T
        for row, tree in rows.trees.items():
            _write_tree(into, row, int(starts_R[row]), tree)
        fill(into["keys_RQ"], row_keys(rows.seeds_R[:, None], into["positions_RQ"][:num_rows] + 1), 0)

    def _write_penalties(self, into: dict[str, Array], rows: RoundRows, counts: TokenCounts) -> None:
        fill(into["repetition_R"], rows.penalties.repetition, 1.0)
        fill(into["presence_R"], rows.penalties.presence, 0.0)
        fill(into["frequency_R"], rows.penalties.frequency, 0.0)
        follows = rows.follows_R is not None
        counts.write_uncounted(into["uncounted_RC"], rows.slots_R, rows.penalties, follows=follows)

    def follow_(self) -> None:
        """Write the tokens that the round before chose into the rows that follow them, inside a graph.

        The larger number is the token: other rows follow a -1, and rows that follow one feed token 0 until then, which
        stays where no token could be chosen.
        """
        tokens_R = self.on_device["tokens_RQ"][:, 0]
        chosen_R = self._results.on_device.index_select(0, self.on_device["follows_R"])
        torch.maximum(tokens_R, chosen_R, out=tokens_R)
        if self.counts is not None:
            self.on_device["uncounted_RC"][:, -1].copy_(chosen_R)

    def penalise_(self, logits_NV: torch.Tensor, first: int, each: int) -> None:
        """Apply penalties in place, inside a graph. With the first column, the round's known tokens are counted.

        Args:
            logits_NV: float32, *each* of each row: after the tokens of columns *first* and on.
            first: a column.
            each: how many.
        """
        if self.counts is None:
            return
        from workers.gpu.kernels.penalties import count_, penalise_  # noqa: PLC0415 - triton may be missing

        if first == 0:
            count_(self.counts.seen_SV, self.on_device)
        penalise_(logits_NV, self.counts.seen_SV, self.on_device, first, each)

    def _cache_index(self, slots_X: Ints, places_X: Ints) -> Ints:
        size = self._slots.block_size
        blocks_X = self._slots.blocks[slots_X, np.minimum(places_X // size, self._slots.blocks.shape[1] - 1)]
        index_X: Ints = blocks_X * np.int64(size) + places_X % size
        return index_X

    @property
    def metadata(self) -> DeviceMetadata:
        """What the target's attention reads."""
        found = self.on_device
        return DeviceMetadata(
            starts_R=found["starts_R"],
            lengths_R=found["lengths_R"],
            offsets_R=self._offsets_R,
            tables_RB=found["tables_RB"],
            rows_T=found["rows_RQ"].view(-1),
            cache_index_T=found["cache_index_RQ"].view(-1),
            first_R=found["first_R"],
            sizes_R=found["sizes_R"],
            positions_RA=found["tree_positions_RQ"],
            visible_TW=found["visible_TW"][:, : self.size.queries - 1],  # of the newest token alone there is no tree
            first_valid_R=self._nothing_R,
            block_size=self._slots.block_size,
            max_length=self.size.queries,
            max_blocks=self._slots.blocks.shape[1],
        )

    def limits(self, repeats: int) -> DeviceLimits:
        """Return the sampling parameters of every row, *repeats* times each."""
        found = self.on_device
        columns = (found[name] for name in ("temperature_R", "top_k_R", "top_p_R", "min_p_R"))
        return DeviceLimits(*(column[:, None].expand(-1, repeats).reshape(-1) for column in columns))


def _write_tree(into: dict[str, Array], row: int, start: int, tree: Draft) -> None:
    """Write what differs from a chain: positions, parents, and which nodes a node attends to, as bits of a word."""
    count, queries = len(tree), into["parents_RQ"].shape[1]
    depths = np.array(tree.depths(), np.int64)
    words: Words = np.array(tree.ancestor_masks(), np.uint64)
    into["positions_RQ"][row, 1 : count + 1] = start + depths
    into["parents_RQ"][row, 1 : count + 1] = np.array(tree.node_parents(), np.int64) + 1
    into["first_R"][row], into["sizes_R"][row] = start + 1, count
    into["tree_positions_RQ"][row, :count] = start + depths
    into["visible_TW"][row * queries + 1 : row * queries + count + 1, 0] = words.view(np.int64)


@dataclass(frozen=True)
class Buffers:
    """The static buffers of an engine.

    Attributes:
        inputs: of every size, in one area.
        results: of every size.
        is_counted: whether rounds with penalties may be run as graphs.
    """

    inputs: Mapping[Size, RoundInputs]
    results: ResultArea
    is_counted: bool

    @classmethod
    def of(
        cls,
        sizes: Seq[Size],
        slots: SlotTable,
        device: torch.device,
        room: InputRoom,
        vocab_size: int,
        *,
        penalises: bool,
    ) -> "Buffers":
        """Allocate them.

        Args:
            sizes: of the rounds.
            slots: the sequences.
            device: of the graphs.
            room: as for `layout`.
            vocab_size: ids that may be sampled.
            penalises: whether the graphs apply penalties themselves. Those of ranks that do not sample, and of trees
                of drafts, leave them out.
        """
        is_counted = choosing.has_kernels(device)
        counts = TokenCounts(slots, vocab_size, device) if is_counted and penalises else None
        num_bytes = max(layout(size, room).size for size in sizes)
        staging = StagingArea(num_bytes, device)
        results = ResultArea(max(LINE * size.rows * size.queries for size in sizes), device)
        inputs = {size: RoundInputs(size, slots, staging, room, counts=counts, results=results) for size in sizes}
        return cls(inputs, results, is_counted)
