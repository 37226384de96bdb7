"""Proposers for tests: random trees around the true continuation, with wrong branches and probes mixed in."""

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from proposers.draft_model import DraftModelProposer
from protos.draft import Draft, DraftRow
from workers.draft.worker import DraftWorker
from workers.verification.acceptance import accept
from workers.verification.probes import subtree


def random_tree(true: Seq[int], size: int, vocab_size: int, dice: random.Random) -> Draft:
    """Return a tree of at most *size* nodes in which some of the *true* tokens can be found, in random order.

    Parents of true nodes are true. Others are wrong tokens, duplicates of true ones, probes, and their descendants.
    """
    tokens: list[int] = []
    parents: list[int] = []
    probes: list[bool] = []
    depth_of = {-1: 0}
    true_nodes = [-1]
    for node in range(size):
        is_true = dice.random() < 0.5 and depth_of[true_nodes[-1]] < len(true)
        parent = true_nodes[-1] if is_true else dice.randrange(-1, node)
        is_probe = not is_true and dice.random() < 0.3
        tokens.append(true[depth_of[parent]] if is_true else dice.randrange(vocab_size))
        parents.append(parent)
        probes.append(is_probe)
        depth_of[node] = depth_of[parent] + 1
        if is_true:
            true_nodes.append(node)
    return Draft(tuple(tokens), tuple(parents), tuple(probes) if any(probes) else ())


def accept_without_probes(draft: Draft, choices: Seq[int]) -> list[int]:
    """Accept as the target worker does for drafts with probes."""
    nodes = draft.acceptable_nodes()
    path = accept(subtree(draft, nodes), [choices[0], *(choices[1 + node] for node in nodes)])
    return [nodes[node] for node in path]


@dataclass
class TreeProposer:
    """Drafts the true continuation of known texts, in the controller process; a quarter are chains, some invalid.

    Args:
        texts: whole texts, prompt and output.
        vocab_size: wrong tokens are below.
        seed: of the random choices.
    """

    texts: Seq[Seq[int]]
    vocab_size: int
    seed: int = 0
    on_worker = False
    drafts: list[Draft] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        found = [self._one(list(row.token_ids), row.k) for row in rows]
        self.drafts += found
        return found

    def _one(self, known: list[int], k: int) -> Draft:
        true = self._continuation(known)
        kind = self.dice.randrange(12)
        if kind == 0:
            return nonsense(k, self.vocab_size, self.dice)
        if kind <= 3:
            return Draft(tuple(true[: self.dice.randint(0, k)]))
        return random_tree(true, self.dice.randint(1, k), self.vocab_size, self.dice)

    def _continuation(self, known: list[int]) -> list[int]:
        for text in self.texts:
            if list(text[: len(known)]) == known:
                return list(text[len(known) :])
        return []


class WorkerTreeProposer(TreeProposer):
    """Runs on the draft worker: trees in some rounds, chains of the draft model in others, never invalid drafts.

    `modelled` has generation and length of the texts that the draft model continued.
    """

    on_worker = True
    runner: DraftWorker

    def __post_init__(self) -> None:
        super().__post_init__()
        self.modelled: set[tuple[int, int]] = set()

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        slots = self.runner.slots
        if self.dice.random() < 0.4:
            self.modelled |= {(int(slots.generation[row.slot]), int(slots.known_len[row.slot])) for row in rows}
            return DraftModelProposer(self.runner).propose(rows)
        found = [self._tree(slots.tokens[row.slot, : slots.known_len[row.slot]].tolist(), row.k) for row in rows]
        self.drafts += found
        return found

    def _tree(self, known: list[int], k: int) -> Draft:
        return random_tree(self._continuation(known), k, self.vocab_size, self.dice)


def nonsense(k: int, vocab_size: int, dice: random.Random) -> Draft:
    """Return a draft that breaks one rule."""
    tokens = tuple(dice.randrange(vocab_size) for _ in range(k))
    bad: list[Callable[[], Draft]] = [
        lambda: Draft(tokens, tuple(range(k))),  # its own parent
        lambda: Draft(tokens, (-1,) * (k + 1)),
        lambda: Draft(tokens, probes=(True,)),
        lambda: Draft((*tokens[:-1], vocab_size), (-1,) * k),
        lambda: Draft((-1, *tokens[1:])),
        lambda: Draft(tokens * 3, (-1,) * k * 3),
        lambda: Draft(tokens, probes=(False,) * (k - 1) + (True,)),
    ]
    return dice.choice(bad)()
