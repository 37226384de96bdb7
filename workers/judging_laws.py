"""Judging by p/q, by the rules "standard" and "block" of `workers.rules`: p at the guesses first, then what is left.

What a draft was drawn from comes with it (`workers.laws`); one that was not drawn but chosen is certain of its guesses,
which is a law as well. Where a law should be and is not, or makes no sense, the row goes on without guesses: whether a
draft came never depends on what it says.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import torch

from protos.drafts import NO_DRAFT, parents_of
from protos.messages import Draft, Row
from workers import rules
from workers.choice import COLDEST, Floats, Ints
from workers.grammar_sampler import GrammarSampler
from workers.judging import Release, Scored, thresholds
from workers.laws import Drawn, chosen, drawn_from, sound
from workers.noise import gumbel, row_keys
from workers.rules_trees import ROOT, block_tree, first_kept, last_of_path, standard_node

ELEMENTS = 1 << 22
"""Probabilities that are computed at a time."""
Rule = Literal["standard", "block"]


@dataclass
class _Case:
    """One row that samples: its draft, as far as it can be judged, and what became of it.

    Attributes:
        first: of its scored positions.
        slot, known: the sequence, and how many tokens it had.
        draft: empty where there is nothing to judge.
        drawn: what is judged, behind each node.
        path: of the nodes that are kept.
        scale, ids_L, left_L: what is left behind them, as in `rules.Kept`; p where there are no ids.
    """

    first: int
    slot: int
    known: int
    draft: Draft
    drawn: dict[int, Drawn]
    path: list[int] = field(default_factory=list)
    scale: float = 1.0
    ids_L: Ints | None = None
    left_L: Floats | None = None

    @property
    def node(self) -> int:
        """Where the path ends."""
        return self.path[-1] if self.path else ROOT

    def ends(self, scale: float, left_L: Floats | None) -> None:
        """Take note of what is left where the path ends."""
        if left_L is not None:
            self.ids_L = self.drawn[self.node].ids_L
            self.scale, self.left_L = scale, left_L[: len(self.ids_L)]


class _Point(NamedTuple):
    """A node of a case: p behind it is asked at some ids."""

    case: _Case
    node: int

    @property
    def ids_L(self) -> Ints:
        """What its children could have been."""
        return self.case.drawn[self.node].ids_L


class ByLaws:
    """Keeps guesses by p/q.

    Args:
        sampler: the ordinary pipeline: its law is p.
        rule: which.
        draws: whether the draft worker draws its guesses, and so owes their laws; else it is certain of them.
    """

    def __init__(self, sampler: GrammarSampler, rule: Rule, *, draws: bool) -> None:
        self._sampler, self._rule, self._draws = sampler, rule, draws

    def prune(self, rows: Seq[Row], drafts: Seq[Draft]) -> Seq[Draft]:
        """See `Judge`. What was drawn is judged whole: to leave some out by what they say would tilt what is left."""
        certain = [NO_DRAFT if self._is_drawn(row) else draft for row, draft in zip(rows, drafts, strict=True)]
        pruned = self._sampler.prune(rows, certain)
        return [draft if self._is_drawn(row) else less for row, draft, less in zip(rows, drafts, pruned, strict=True)]

    def judge(self, scored: Scored) -> list[Release]:
        """See `Judge`. Probes are answered by the likeliest token, which tells nothing of noise that is yet to come."""
        cases = self._cases(scored)
        judged = [case for case in cases if case.drawn]
        if judged:
            u_RN = thresholds(self._sampler, np.array([case.slot for case in judged]),
                              np.array([case.known for case in judged]), max(len(case.draft) for case in judged))
            chains = [i for i, case in enumerate(judged) if case.draft.is_chain]
            trees = [i for i, case in enumerate(judged) if not case.draft.is_chain]
            self._judge_chains(scored, [judged[i] for i in chains], u_RN[chains])
            self._judge_trees(scored, [judged[i] for i in trees], u_RN[trees])
        own = self._own_tokens(scored, cases)
        return [Release(case.path, [*(case.draft.tokens[node] for node in case.path), y], self._probed(scored, case))
                for case, y in zip(cases, own, strict=True)]

    def _is_drawn(self, row: Row) -> bool:
        return self._draws and row.draft is None and self._sampler.slots.sampling[row.slot].temperature >= COLDEST

    def _cases(self, scored: Scored) -> list[_Case]:
        found, first = [], 0
        for row, draft, count in zip(scored.rows, scored.drafts, scored.counts_R.tolist(), strict=True):
            if count:
                found.append(_Case(first, row.slot, int(scored.index_N[first]), draft, self._drawn(scored, row, draft)))
                first += count
        return found

    def _drawn(self, scored: Scored, row: Row, draft: Draft) -> dict[int, Drawn]:
        """Return what is judged; nothing where it cannot be."""
        if not self._is_drawn(row):
            return chosen(draft)
        laws = scored.laws.get(row.slot)
        is_sound = laws is not None and sound(draft, laws, self._sampler.vocab_size)
        return drawn_from(draft, laws) if laws is not None and is_sound else {}

    # Chains.

    def _judge_chains(self, scored: Scored, cases: Seq[_Case], u_RK: Floats) -> None:
        """Judge all chains at once."""
        if not cases:
            return
        counts_R = np.array([len(case.draft) for case in cases])
        points = [_Point(case, node) for case in cases for node in range(ROOT, len(case.draft) - 1)]
        shape = (len(cases), int(counts_R.max()), max(len(point.ids_L) for point in points))
        is_guess_RK = np.arange(shape[1]) < counts_R[:, None]
        p_RKL, q_RKL, guess_RK = np.zeros(shape), np.zeros(shape), np.zeros(shape[:2], np.int64)
        p_RKL[is_guess_RK] = self._laws_at(scored, points)
        q_RKL[is_guess_RK] = _padded([point.case.drawn[point.node].children.q_WL[0] for point in points])
        guess_RK[is_guess_RK] = [point.case.drawn[point.node].children.drawn_W[0] for point in points]
        chains = rules.Chains(counts_R, p_RKL, q_RKL, guess_RK)
        kept = (rules.standard if self._rule == "standard" else rules.block)(chains, u_RK[:, : shape[1]])
        for case, count, scale, left_L in zip(cases, kept.counts_R.tolist(), kept.scale_R.tolist(), kept.left_RL,
                                              strict=True):
            case.path = list(range(count))
            case.ends(scale, left_L if count < len(case.draft) else None)

    # Trees.

    def _judge_trees(self, scored: Scored, cases: Seq[_Case], u_RN: Floats) -> None:
        judge = self._walk_down if self._rule == "standard" else self._come_up
        judge(scored, cases, u_RN)
        for case in cases:
            self._stand_behind(case, case.path)

    def _walk_down(self, scored: Scored, cases: Seq[_Case], u_RN: Floats) -> None:
        """Walk all trees together, a level at a time: as `rules_trees.standard_tree`."""
        walks = [(case, u_N) for case, u_N in zip(cases, u_RN, strict=True) if ROOT in case.drawn]
        while walks:
            p_WL = self._laws_at(scored, [_Point(case, case.node) for case, _ in walks])
            walks = [(case, u_N) for (case, u_N), p_L in zip(walks, p_WL, strict=True) if self._goes_on(case, p_L, u_N)]

    def _goes_on(self, case: _Case, p_L: Floats, u_N: Floats) -> bool:
        """Let a walk go to a child, and say whether there is somewhere to go from there."""
        drawn = case.drawn[case.node]
        children = drawn.children
        standing = standard_node(p_L[: len(drawn.ids_L)], children)
        kept = first_kept(standing, u_N[list(children.nodes)])
        if kept is None:
            case.ends(float(standing.scales_J[-1]), standing.left_JL[-1])
            return False
        case.path.append(children.nodes[kept])
        self._stand_behind(case, case.path)
        return case.node in case.drawn

    def _come_up(self, scored: Scored, cases: Seq[_Case], u_RN: Floats) -> None:
        """Compute p behind all inner nodes, one of each tree at a time, and judge as `rules_trees.block_tree`."""
        p: list[dict[int, Floats]] = [{} for _ in cases]
        for place in range(max((len(case.drawn) for case in cases), default=0)):
            some = [(i, case, [*case.drawn][place]) for i, case in enumerate(cases) if place < len(case.drawn)]
            for _, case, node in some:
                self._stand_behind(case, _path_to(case.draft, node))
            p_XL = self._laws_at(scored, [_Point(case, node) for _, case, node in some])
            for (i, case, node), p_L in zip(some, p_XL, strict=True):
                p[i][node] = p_L[: len(case.drawn[node].ids_L)]
        for case, p_of, u_N in zip(cases, p, u_RN, strict=True):
            trials = block_tree(p_of, {node: drawn.children for node, drawn in case.drawn.items()})
            end = last_of_path(trials, u_N)
            case.path = _path_to(case.draft, end.node)
            case.ends(end.scale, end.left_L)

    def _stand_behind(self, case: _Case, path: Seq[int]) -> None:
        """Let the sampler see the text that leads to a node."""
        self._sampler.slots.write_draft(case.slot, [case.draft.tokens[node] for node in path])

    # Laws and tokens.

    def _laws_at(self, scored: Scored, points: Seq[_Point]) -> Floats:
        """Return p behind each point at its ids, `[M, L]`; 0 where it has fewer than others."""
        at_M = np.array([point.case.first + 1 + point.node for point in points])
        ids_ML, count = _padded([point.ids_L for point in points]), max(1, ELEMENTS // self._sampler.vocab_size)
        blocks = [slice(first, first + count) for first in range(0, len(at_M), count)]
        p_ML = torch.cat([self._law(scored, at_M[block]).gather(1, _on(ids_ML[block].astype(np.int64), scored))
                          for block in blocks]).cpu().numpy()
        sizes_M = np.array([len(point.ids_L) for point in points])
        found_ML: Floats = np.where(np.arange(p_ML.shape[1]) < sizes_M[:, None], p_ML, 0.0)
        return found_ML

    def _law(self, scored: Scored, at_M: Ints) -> torch.Tensor:
        return self._sampler.law(scored.logits_NV[_on(at_M, scored)], scored.slots_N[at_M], scored.index_N[at_M])

    def _own_tokens(self, scored: Scored, cases: Seq[_Case]) -> list[int]:
        """Return the token behind each path: as ever where all of p is left, else drawn from what is."""
        own = np.zeros(len(cases), np.int64)
        whole = [i for i, case in enumerate(cases) if case.left_L is None]
        rest = [i for i, case in enumerate(cases) if case.left_L is not None]
        for part, tokens in ((whole, self._sampled), (rest, self._drawn_from_rest)):
            if part:
                own[part] = tokens(scored, [cases[i] for i in part]).cpu().numpy()
        found: list[int] = own.tolist()
        return found

    def _sampled(self, scored: Scored, cases: Seq[_Case]) -> torch.Tensor:
        at_R = _ends(cases)
        return self._sampler.sample(scored.logits_NV[_on(at_R, scored)], scored.slots_N[at_R], scored.index_N[at_R])

    def _drawn_from_rest(self, scored: Scored, cases: Seq[_Case]) -> torch.Tensor:
        """Draw by the noise that the target would have used for the token anyhow: nothing was decided by it yet."""
        at_R = _ends(cases)
        p_RV = self._law(scored, at_R)
        at_M2 = [(r, token) for r, case in enumerate(cases) for token in (() if case.ids_L is None else case.ids_L)]
        left_M = np.concatenate([case.left_L for case in cases if case.left_L is not None])
        left_RV = rules.left(p_RV, _on(np.array([case.scale for case in cases]), scored),
                             _on(np.array(at_M2, np.int64), scored), _on(left_M, scored))
        keys_R = row_keys(self._sampler.seeds(scored.slots_N[at_R]), scored.index_N[at_R])
        noise_RV = gumbel(_on(keys_R, scored)[:, None], torch.arange(p_RV.shape[1], device=p_RV.device))
        return rules.drawn(left_RV, noise_RV)

    def _probed(self, scored: Scored, case: _Case) -> Seq[int]:
        probes = np.flatnonzero(case.draft.probes)
        if not len(probes):
            return ()
        p_MV = self._law(scored, case.first + 1 + probes)
        answers: list[int] = torch.where(p_MV.amax(1) > 0, p_MV.argmax(1), -1).tolist()
        return answers


def _ends(cases: Seq[_Case]) -> Ints:
    """Return the scored position where each path ends."""
    return np.array([case.first + 1 + case.node for case in cases])


def _path_to(draft: Draft, node: int) -> list[int]:
    """Return the nodes from the root down to one, itself included."""
    parents, path = parents_of(draft), list[int]()
    while node != ROOT:
        path.insert(0, node)
        node = parents[node]
    return path


def _padded(values: Seq[Ints | Floats]) -> Floats:
    """Return arrays of unlike lengths as rows, filled up with zeros."""
    table = np.zeros((len(values), max(map(len, values))))
    for line, some in zip(table, values, strict=True):
        line[: len(some)] = some
    return table


def _on(values: Ints | Floats, scored: Scored) -> torch.Tensor:
    """Return *values* where the logits are."""
    return torch.from_numpy(values).to(scored.logits_NV.device)
