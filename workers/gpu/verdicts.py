"""The verdicts of a round's rows, from the result that its graph has left."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from protos.draft import Draft
from protos.messages import Row, Verdict, with_tree
from workers.attention.batch import Ints
from workers.gpu.sizes import LINE
from workers.sampling.sampler import NOT_A_NUMBER

PREFIXES = [tuple(range(length)) for length in range(65)]
"""The paths of chains, by the number of tokens that are accepted."""


def verdicts_of(rows: Seq[Row], drafted_R: Ints, trees: Mapping[int, Draft], lines_RX: Ints) -> list[Verdict]:
    """Return the verdict of each row.

    Args:
        rows: R of them.
        drafted_R: number of draft tokens.
        trees: the drafts that are no chains, by row.
        lines_RX: the result, see `TargetStep`.
    """
    queries, drafted = lines_RX.shape[1] // LINE, drafted_R.tolist()
    return [
        tree_verdict(row.slot, trees[r], line, queries)
        if r in trees
        else _verdict(row.slot, drafted[r], PREFIXES[line[queries].bit_length() if line[queries] >= 0 else 64], line)
        for r, (row, line) in enumerate(zip(rows, lines_RX.tolist(), strict=True))
    ]


def tree_verdict(slot: int, tree: Draft, line: list[int], queries: int) -> Verdict:
    """Return the verdict of a row whose draft is a tree, from its line of the result, in a size of so many queries."""
    path = list[int]()
    for node, parent in enumerate(tree.node_parents()):
        # Of equal siblings only the first is on the path.
        if line[queries] >> node & 1 and parent == (path[-1] if path else -1):
            path.append(node)
    return with_tree(_verdict(slot, len(tree), path, line), tree)


def _verdict(slot: int, drafted: int, path: Seq[int], line: list[int]) -> Verdict:
    emitted = [line[0], *[line[node + 1] for node in path]]
    if emitted[0] == -1:
        return Verdict(slot, failed=NOT_A_NUMBER)
    if emitted[-1] == -1:  # after the last accepted token, which may end the sequence; else the next round fails
        path, emitted = path[:-1], emitted[:-1]
    return Verdict(slot, emitted, drafted, path)
