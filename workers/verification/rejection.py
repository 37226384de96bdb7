"""Judging by p/q, by the rules "standard" and "block" of `workers.verification.rejection_math`.

What a draft was drawn from comes with it (`workers.verification.draft_probs`); one that was not drawn but chosen is
certain of its guesses,
which is a law as well. Where a law should be and is not, or makes no sense, the row goes on without guesses: whether a
draft came never depends on what it says.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import torch

from protos.draft import NO_DRAFT, Draft
from protos.messages import Row
from workers.sampling.noise import gumbel, row_keys
from workers.sampling.sample import MIN_TEMPERATURE, Floats, Ints
from workers.sampling.sampler import Sampler
from workers.verification import rejection_math as rules
from workers.verification.acceptance import AcceptedTokens, Scored, thresholds
from workers.verification.draft_probs import ChainTable, DraftProbs, Drawn, chosen, drawn_from, sound
from workers.verification.rejection_math_trees import ROOT, block_tree, first_kept, last_of_path, standard_node

CACHED, ELEMENTS = 1 << 17, 1 << 24
"""Probabilities that are computed at a time: on a host so that they stay in its cache, on a device to bound memory."""
Rule = Literal["standard", "block"]


@dataclass
class _Case:
    """One row that samples: its draft, as far as it can be judged, and what became of it.

    Attributes:
        first: of its scored positions.
        slot, known: the sequence, and how many tokens it had.
        draft: what is judged; empty where nothing can be.
        laws: it was drawn from; None where it is certain.
        path: of the nodes that are kept.
        scale, ids_L, left_L: what is left behind them, as in `rules.Kept`; p where there are no ids.
    """

    first: int
    slot: int
    known: int
    draft: Draft
    laws: DraftProbs | None
    path: list[int] = field(default_factory=list)
    scale: float = 1.0
    ids_L: Ints | None = None
    left_L: Floats | None = None

    @property
    def node(self) -> int:
        """Where the path ends."""
        return self.path[-1] if self.path else ROOT

    @cached_property
    def drawn(self) -> dict[int, Drawn]:
        """For a tree, what is judged behind each node that has children."""
        return chosen(self.draft) if self.laws is None else drawn_from(self.draft, self.laws)

    def ends(self, scale: float, left_L: Floats) -> None:
        """Take note of what is left where the path ends, at `ids_L` and elsewhere."""
        self.scale, self.left_L = scale, left_L


class RejectionSampler:
    """Keeps guesses by p/q.

    Args:
        sampler: the ordinary pipeline: its law is p.
        rule: which.
        draws: whether the draft worker draws its guesses, and so owes their laws; else it is certain of them.
    """

    def __init__(self, sampler: Sampler, rule: Rule, *, draws: bool) -> None:
        self._sampler, self._rule, self._draws = sampler, rule, draws

    def prune(self, rows: Seq[Row], drafts: Seq[Draft]) -> Seq[Draft]:
        """See `AcceptanceRule`. Sampled drafts are not pruned: leaving out tokens for what they are would bias them."""
        certain = [NO_DRAFT if self._is_drawn(row) else draft for row, draft in zip(rows, drafts, strict=True)]
        pruned = self._sampler.prune(rows, certain)
        return [draft if self._is_drawn(row) else less for row, draft, less in zip(rows, drafts, pruned, strict=True)]

    def accept(self, scored: Scored) -> list[AcceptedTokens]:
        """See `AcceptanceRule`."""
        cases = self._cases(scored)
        chains = [case for case in cases if case.draft.is_chain and case.draft.tokens]
        trees = [case for case in cases if not case.draft.is_chain]
        for some, judge in ((chains, self._judge_chains), (trees, self._judge_trees)):
            if some:
                judge(scored, some, self._thresholds(some))
        own = self._own_tokens(scored, cases)
        return [
            AcceptedTokens(case.path, [*(case.draft.tokens[node] for node in case.path), y])
            for case, y in zip(cases, own, strict=True)
        ]

    def next_tokens(self, scored: Scored, at_M: Ints) -> list[int]:
        """See `AcceptanceRule`. The most likely tokens, which do not depend on noise that later rounds will use."""
        p_MV = self._law(scored, at_M)
        tokens_M: list[int] = torch.where(p_MV.amax(1) > 0, p_MV.argmax(1), -1).tolist()
        return tokens_M

    def _thresholds(self, cases: Seq[_Case]) -> Floats:
        return thresholds(
            self._sampler,
            np.array([case.slot for case in cases]),
            np.array([case.known for case in cases]),
            max(len(case.draft) for case in cases),
        )

    def _is_drawn(self, row: Row) -> bool:
        return (
            self._draws and row.draft is None and self._sampler.slots.sampling[row.slot].temperature >= MIN_TEMPERATURE
        )

    def _cases(self, scored: Scored) -> list[_Case]:
        """Return the rows that sample; a draft that should have laws and has none that make sense is left out."""
        found, first = [], 0
        for row, draft, count in zip(scored.rows, scored.drafts, scored.counts_R.tolist(), strict=True):
            if count:
                laws = scored.draft_probs.get(row.slot) if draft.tokens and self._is_drawn(row) else None
                judged = draft if laws is not None or not self._is_drawn(row) else NO_DRAFT
                found.append(_Case(first, row.slot, int(scored.index_N[first]), judged, laws))
                first += count
        told = [(case, case.laws) for case in found if case.laws is not None]
        for (case, _), is_sound in zip(
            told,
            sound([case.draft for case, _ in told], [laws for _, laws in told], self._sampler.vocab_size),
            strict=True,
        ):
            case.draft = case.draft if is_sound else NO_DRAFT
        return found

    # Chains.

    def _judge_chains(self, scored: Scored, cases: Seq[_Case], u_RK: Floats) -> None:
        """Judge all chains at once."""
        table = ChainTable.of([case.draft for case in cases], [case.laws for case in cases])
        place_RK = np.array([case.first for case in cases])[:, None] + np.arange(u_RK.shape[1])
        is_guess_RK = table.is_id_RKL.any(2)
        p_RKL = np.zeros_like(table.q_RKL)
        p_RKL[is_guess_RK] = self._laws_at(scored, place_RK[is_guess_RK], table.ids_RKL[is_guess_RK])
        chains = rules.ChainBatch(table.counts_R, p_RKL * table.is_id_RKL, table.q_RKL, table.guess_RK)
        kept = (rules.standard if self._rule == "standard" else rules.block)(chains, u_RK)
        for r, (case, count) in enumerate(zip(cases, kept.counts_R.tolist(), strict=True)):
            case.path = list(range(count))
            if count < len(case.draft):
                is_id_L = table.is_id_RKL[r, count]
                case.ids_L = table.ids_RKL[r, count, is_id_L]
                case.ends(float(kept.scale_R[r]), kept.left_RL[r, is_id_L])

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
            p_WL = self._laws_behind(scored, [(case, case.node) for case, _ in walks])
            walks = [(case, u_N) for (case, u_N), p_L in zip(walks, p_WL, strict=True) if self._goes_on(case, p_L, u_N)]

    def _goes_on(self, case: _Case, p_L: Floats, u_N: Floats) -> bool:
        """Let a walk go to a child, and say whether there is somewhere to go from there."""
        drawn = case.drawn[case.node]
        children = drawn.children
        standing = standard_node(p_L[: len(drawn.ids_L)], children)
        kept = first_kept(standing, u_N[list(children.nodes)])
        if kept is None:
            case.ids_L = drawn.ids_L
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
            p_XL = self._laws_behind(scored, [(case, node) for _, case, node in some])
            for (i, case, node), p_L in zip(some, p_XL, strict=True):
                p[i][node] = p_L[: len(case.drawn[node].ids_L)]
        for case, p_of, u_N in zip(cases, p, u_RN, strict=True):
            trials = block_tree(p_of, {node: drawn.children for node, drawn in case.drawn.items()})
            end = last_of_path(trials, u_N)
            case.path = _path_to(case.draft, end.node)
            if end.left_L is not None:
                case.ids_L = case.drawn[end.node].ids_L
                case.ends(end.scale, end.left_L)

    def _stand_behind(self, case: _Case, path: Seq[int]) -> None:
        """Let the sampler see the text that leads to a node."""
        self._sampler.slots.write_draft(case.slot, [case.draft.tokens[node] for node in path])

    # Laws and tokens.

    def _laws_behind(self, scored: Scored, nodes: Seq[tuple[_Case, int]]) -> Floats:
        """Return p behind nodes of trees at the ids of their children's laws, `[M, L]`, and anything behind those."""
        ids = [case.drawn[node].ids_L for case, node in nodes]
        ids_ML = np.zeros((len(ids), max(map(len, ids))), np.int64)
        for line, own in zip(ids_ML, ids, strict=True):
            line[: len(own)] = own
        return self._laws_at(scored, np.array([case.first + 1 + node for case, node in nodes]), ids_ML)

    def _laws_at(self, scored: Scored, at_M: Ints, ids_ML: Ints) -> Floats:
        """Return p at some ids behind some of the scored positions, `[M, L]`."""
        p_ML = torch.cat(
            [
                self._law(scored, at_M[block]).gather(1, _on(ids_ML[block], scored))
                for block in self._blocks(scored, len(at_M))
            ]
        )
        found_ML: Floats = p_ML.cpu().numpy()
        return found_ML

    def _blocks(self, scored: Scored, num_rows: int) -> list[slice]:
        """Return the parts in which as many laws are computed."""
        elements = CACHED if scored.logits_NV.device.type == "cpu" else ELEMENTS
        count = max(1, elements // self._sampler.vocab_size)
        return [slice(first, first + count) for first in range(0, num_rows, count)]

    def _law(self, scored: Scored, at_M: Ints) -> torch.Tensor:
        return self._sampler.distribution(
            scored.logits_NV[_on(at_M, scored)], scored.slots_N[at_M], scored.index_N[at_M]
        )

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
        return torch.cat([self._drawn_at_once(scored, cases[block]) for block in self._blocks(scored, len(cases))])

    def _drawn_at_once(self, scored: Scored, cases: Seq[_Case]) -> torch.Tensor:
        at_R = _ends(cases)
        p_RV = self._law(scored, at_R)
        ids = [case.ids_L for case in cases if case.ids_L is not None]
        at_M2 = np.stack((np.repeat(np.arange(len(ids)), [len(own) for own in ids]), np.concatenate(ids)), 1)
        left_M = np.concatenate([case.left_L for case in cases if case.left_L is not None])
        left_RV = rules.left(
            p_RV, _on(np.array([case.scale for case in cases]), scored), _on(at_M2, scored), _on(left_M, scored)
        )
        keys_R = row_keys(self._sampler.seeds(scored.slots_N[at_R]), scored.index_N[at_R])
        noise_RV = gumbel(_on(keys_R, scored)[:, None], torch.arange(p_RV.shape[1], device=p_RV.device))
        return rules.drawn(left_RV, noise_RV)


def _ends(cases: Seq[_Case]) -> Ints:
    """Return the scored position where each path ends."""
    return np.array([case.first + 1 + case.node for case in cases])


def _path_to(draft: Draft, node: int) -> list[int]:
    """Return the nodes from the root down to one, itself included."""
    parents, path = draft.node_parents(), list[int]()
    while node != ROOT:
        path.insert(0, node)
        node = parents[node]
    return path


def _on(values: Ints | Floats, scored: Scored) -> torch.Tensor:
    """Return *values* where the logits are."""
    return torch.from_numpy(values).to(scored.logits_NV.device)
