"""How many draft tokens pay: for chains token by token and row by row, for trees one size for all rows."""

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Protocol

import numpy as np

from protos.draft import PREDICTION
from protos.messages import Verdict
from runtime.core.sequence import Sequence
from runtime.policy.acceptance import NOT_ASKED, WORKER_ALONE, AcceptanceModel, Asked, DecodingRow, Sources
from runtime.policy.allocation import Allocation, Offer, allocate
from runtime.policy.base import FinishedStep
from runtime.policy.cost_model import Ints, RoundCosts
from runtime.policy.sizes import SizeModel, choose_size, ladder


class Chooser(Protocol):
    """Measures acceptance, and chooses by it.

    `sizes` are the numbers of draft tokens for a row whose acceptance is measured, ascending.
    """

    @property
    def sizes(self) -> Seq[int]: ...  # noqa: D102

    def choose(self, rows: Seq[DecodingRow], costs: RoundCosts) -> Allocation:
        """Return the number of draft tokens of each row from each source that maximises tokens per second."""
        ...

    def record(self, verdict: Verdict, row: DecodingRow, asked: Seq[int], source: int) -> None:
        """Learn from the verdict of a row.

        Args:
            verdict: of the row.
            row: with what its request showed before.
            asked: draft tokens that each source might be asked for. A draft may have fewer, or none.
            source: that of the draft: those before it were asked in vain, those after it not at all.
        """
        ...

    def age(self) -> None:
        """Let the next verdicts count more."""
        ...

    def describe(self) -> str:
        """Return what was measured, for a log line."""
        ...


class Chosen:
    """The draft tokens of a round: those of the rows that were decided on, and for others what is typical of them.

    Args:
        limit: most draft tokens of a row, and those of all rows at first.
        num_sources: of drafts.

    Attributes:
        largest: number of draft tokens of any row.
        typical: number from each source.
    """

    def __init__(self, limit: int, num_sources: int) -> None:
        self._num_sources = num_sources
        self.use_everywhere(limit)

    def use_everywhere(self, k: int) -> None:
        """Choose *k* for all rows and sources."""
        self._by_key: dict[int, tuple[int, ...]] = {}
        self.typical, self.largest = (k,) * self._num_sources, k

    def use(self, k_RS: Ints, keys: Iterable[int]) -> None:
        """Choose *k_RS*, int64 `[R, S]`, for the rows of sequences with these *keys*."""
        self._by_key = dict(zip(keys, map(tuple, k_RS.tolist()), strict=True))
        self.typical = tuple(k_RS.mean(axis=0).round().astype(int).tolist())
        self.largest = int(k_RS.max())

    @property
    def is_decided(self) -> bool:
        """Whether it was decided for each row."""
        return bool(self._by_key)

    def __contains__(self, key: object) -> bool:
        """Whether the row of the sequence with this *key* was decided on."""
        return key in self._by_key

    def of(self, key: int) -> tuple[int, ...]:
        """Return the number from each source for the sequence with this *key*."""
        return self._by_key.get(key, self.typical)

    def most(self, key: int, source: int | None) -> int:
        """Return the number from *source* for the sequence with this *key*; None: the largest from any."""
        chosen = self.of(key)
        return max(chosen) if source is None else chosen[source]

    def asked(self, running: Seq[Sequence], rows: Mapping[int, DecodingRow]) -> dict[int, Asked]:
        """Return what those of *running* that have one of *rows*, which are by key, are asked for: by slot."""
        decoding = [(one, rows[one.key]) for one in running if one.key in rows]
        return {one.slot: Asked(tuple(map(min, row.limits, self.of(one.key))), row) for one, row in decoding}


def record(chooser: Chooser, step: FinishedStep, asked: Mapping[int, Asked], catching_up: Collection[int]) -> None:
    """Let *chooser* learn from a step.

    It does not learn from rows that began in the step: they may have been asked for other drafts. Nor from rows that
    had fewer tokens left than they were asked for.

    Args:
        chooser: learns.
        step: finished.
        asked: by slot.
        catching_up: slots without a draft because the draft had not read their prompts.
    """
    planned = {row.slot: row for row in step.plan.rows}
    for verdict in step.verdicts:
        k_S, row = asked.get(verdict.slot, NOT_ASKED)
        if any(k_S) and verdict.slot not in catching_up and max(k_S) <= planned[verdict.slot].depth:
            chooser.record(verdict, row, k_S, planned[verdict.slot].source)


def chosen_of_predictions(chooser: Chooser, rows: Seq[DecodingRow], costs: RoundCosts, sources: Sources) -> Ints:
    """Return the draft tokens of all rows from each of the *sources*, `[R, S]`: of requests' predictions only."""
    predicted = [row.first(PREDICTION + 1) for row in rows] if sources.predicts else []
    if any(any(row.limits) for row in predicted):
        return chooser.choose(predicted, costs).k_RS
    return np.zeros((len(rows), len(sources)), np.int64)


class ChainChooser:
    """For drafts without branches, of at most *limit* tokens."""

    def __init__(self, limit: int, sources: Sources = WORKER_ALONE) -> None:
        self.sizes: Seq[int] = range(1, limit + 1)
        self._sources = sources
        self._models = [AcceptanceModel(limit) for _ in range(len(sources))]

    def choose(self, rows: Seq[DecodingRow], costs: RoundCosts) -> Allocation:
        """See `Chooser`. Rows are not looked up by a method that would hold back better drafts, where that pays."""
        limits_RS = _limits(rows)
        asked = np.flatnonzero(limits_RS.any(axis=0)).tolist()
        if not asked:
            return Allocation(np.zeros_like(limits_RS), len(rows), costs.plain(), 1.0)
        best = _allocate([self._offer(source, rows, limits_RS[:, source]) for source in asked], len(rows), costs)
        k_RS = np.zeros_like(limits_RS)
        k_RS[:, asked] = best.k_RS
        return replace(best, k_RS=k_RS)

    def _offer(self, source: int, rows: Seq[DecodingRow], limits_R: Ints) -> Offer:
        model = self._models[source]
        model.refresh()
        survival_RD = model.survival([row.acceptances[source] for row in rows])
        is_free = self._sources.predicts and source == PREDICTION
        return Offer(survival_RD, model.drafted, limits_R, source == self._sources.worker, is_free)

    def record(self, verdict: Verdict, row: DecodingRow, asked: Seq[int], source: int) -> None:
        """See `Chooser`."""
        for index, (model, acceptance, k) in enumerate(zip(self._models, row.acceptances, asked, strict=True)):
            if k and index < source:
                model.observe(acceptance, k, 0, 0)
            elif k and index == source:
                model.observe(acceptance, k, verdict.proposed, len(verdict.path))

    def age(self) -> None:
        """See `Chooser`."""
        for model in self._models:
            model.age()

    def describe(self) -> str:
        """See `Chooser`."""
        rates = ", ".join(f"{model.rates[0]:.0%}" for model in self._models[self._sources.predicts :])
        return f"{rates} of the first draft tokens are accepted"


def _allocate(offers: list[Offer], num_rows: int, costs: RoundCosts) -> Allocation:
    best = allocate(offers, num_rows, costs)
    for source in range(len(offers) - 1):
        after_R = np.max([one.found_R for one in offers[source + 1 :]], axis=0)
        is_worse_R = offers[source].found_R < after_R
        if not is_worse_R.any():
            continue
        fewer = [*offers]
        fewer[source] = replace(offers[source], limits_R=np.where(is_worse_R, 0, offers[source].limits_R))
        found = allocate(fewer, num_rows, costs)
        if found.gain > best.gain:
            offers, best = fewer, found
    return best


class TreeChooser:
    """For drafts with branches, of at most *limit* nodes. Those of all sources count as one, but for predictions."""

    def __init__(self, limit: int, sources: Sources = WORKER_ALONE) -> None:
        self.sizes: Seq[int] = ladder(limit)
        self._model = SizeModel(self.sizes)
        self._predicted = ChainChooser(limit, sources)

    def choose(self, rows: Seq[DecodingRow], costs: RoundCosts) -> Allocation:
        """See `Chooser`. Rows that can have nothing but predictions get as many of their tokens as pay."""
        limits_RS = _limits(rows)
        if limits_RS.shape[1] > 1 and not limits_RS[:, PREDICTION + 1 :].any():
            return self._predicted.choose(rows, costs)
        best = choose_size(self._model, limits_RS.max(axis=1), len(rows), costs)
        return replace(best, k_RS=np.minimum(best.k_RS, limits_RS))

    def record(self, verdict: Verdict, row: DecodingRow, asked: Seq[int], source: int) -> None:
        """See `Chooser`."""
        if len(asked) > 1 and row.limits[PREDICTION]:
            self._predicted.record(verdict, row, asked, source)
        if source or len(asked) == 1:
            self._model.observe(max(asked), verdict.proposed, len(verdict.path))

    def age(self) -> None:
        """See `Chooser`."""
        self._model.age()
        self._predicted.age()

    def describe(self) -> str:
        """See `Chooser`."""
        return f"{self._model.accepted()[-1]:.2f} draft tokens of the largest tree are accepted"


def _limits(rows: Seq[DecodingRow]) -> Ints:
    """Return the limits of all rows and sources, `[R, S]`."""
    return np.array([row.limits for row in rows], np.int64)
