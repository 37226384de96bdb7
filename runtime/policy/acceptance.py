"""Measured acceptance: the probability that the first d draft tokens of a row are all accepted, for each depth d.

What a round shows is used from the next round on. All methods of an engine share one estimate for each method; each
request has a deviation from it, which is small as long as little of the request was seen.
"""

from collections.abc import Container
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from protos.draft import PREDICTION
from protos.messages import Request
from runtime.core.sequence import Sequence

Floats = npt.NDArray[np.float64]

ASSUMED = 0.7
"""Acceptance of a typical trained draft of the same family, before anything was measured."""
PRIOR_TRIALS = 4.0
"""Weight of the assumption for depth 1, and of drafted tokens of the depth before for each further depth, in trials."""
LEAST_ASSUMED = 0.5
"""The least that the weight of the assumption falls to: it is forgotten with what was seen."""
MEMORY_TRIALS = 200.0
"""When so many first draft tokens were tried, half of what was seen is forgotten."""
AGED_TRIALS = 16.0
"""Of what was seen, so many trials still count after a while without drafts."""
REQUEST_PRIOR = 32.0
"""Weight of the method's estimate in that for a request, in trials: as if requests differed by about 0.08."""
REQUEST_MEMORY = 0.96
"""Share of a request's trials that each of its drafts keeps: its text changes."""


@dataclass(frozen=True)
class Sources:
    """Where the drafts of an engine come from: the sources are numbered in the order in which they are asked.

    If any method looks drafts up in the controller process, the first source is `PREDICTION`.

    Attributes:
        methods: of the cascade, in order.
        has_worker: whether the last of them runs on a draft worker.
    """

    methods: tuple[str, ...] = ("",)
    has_worker: bool = True

    def __len__(self) -> int:
        return len(self.methods) + self.predicts

    @property
    def predicts(self) -> bool:
        """Whether predictions are followed."""
        return len(self.methods) > self.has_worker

    @property
    def worker(self) -> int:
        """The number of the draft worker, if there is one; that of rows without a draft, if not."""
        return len(self) - self.has_worker

    def looked_up(self, k_S: Seq[int]) -> tuple[int, ...]:
        """Return *k_S*, 0 for the sources that are not looked up: predictions and the draft worker."""
        return tuple([k * (PREDICTION < source < self.worker) for source, k in enumerate(k_S)])

    def may_draft(self, source: int, request: Request) -> bool:
        """Whether *source* may draft for *request*."""
        if self.predicts and source == PREDICTION:
            return bool(request.prediction_token_ids)
        return request.method in {None, self.methods[source - self.predicts]}


WORKER_ALONE = Sources()


@dataclass(slots=True)
class RequestAcceptance:
    """What one request showed: draft tokens that were tried, those accepted, and drafts by how many were tried of each.

    A draft token is tried if all before it were accepted.
    """

    tried: float = 0.0
    accepted: float = 0.0
    drafts: list[float] = field(default_factory=list)

    def add(self, tried: int, accepted: int) -> None:
        """Add a draft, and forget a part of those before."""
        self.tried = REQUEST_MEMORY * self.tried + tried
        self.accepted = REQUEST_MEMORY * self.accepted + accepted
        self.drafts = [REQUEST_MEMORY * number for number in self.drafts]
        self.drafts += [0.0] * (tried + 1 - len(self.drafts))
        self.drafts[tried] += 1

    @property
    def weight(self) -> float:
        """What its next draft shows of other requests: the less, the more of it was seen."""
        return REQUEST_PRIOR / (REQUEST_PRIOR + self.tried)

    def factor(self, usual: Seq[float]) -> float:
        """Return how much better or worse than usual the odds of its draft tokens were.

        Of so many tokens tried one after another, *usual* is how many are accepted in all requests, as far as is known
        by now: rates of the first token and of later ones may differ much, and change apart.
        """
        if not self.tried:
            return 1.0
        expected = sum([number * accepted for number, accepted in zip(self.drafts, usual, strict=False)])
        prior, trials = REQUEST_PRIOR * usual[1], self.tried + REQUEST_PRIOR
        return _odds((self.accepted + prior) / trials) / _odds((expected + prior) / trials)


@dataclass(frozen=True)
class DecodingRow:
    """A decoding row: its most draft tokens from each source, and what drafts of each showed for its request so far.

    How many tokens the request has left makes no difference: a decision lasts for longer than its last rounds.
    """

    limits: tuple[int, ...]
    acceptances: tuple[RequestAcceptance, ...]

    def first(self, num_sources: int) -> "DecodingRow":
        """Return the row with draft tokens from the first sources only."""
        limits = [limit * (source < num_sources) for source, limit in enumerate(self.limits)]
        return DecodingRow(tuple(limits), self.acceptances)


class Asked(NamedTuple):
    """A row that decodes in a round, and the most draft tokens that it was asked for from each source."""

    k_S: tuple[int, ...]
    row: DecodingRow


NOT_ASKED = Asked((), DecodingRow((), ()))


class DecodingRows:
    """The rows of all requests, which keep what was shown of each.

    Args:
        limit: most draft tokens of a row.
        sources: of drafts.
        may_branch: whether drafts may be trees.
    """

    def __init__(self, limit: int, sources: Sources, *, may_branch: bool) -> None:
        self.sources, self._worker_is_up = sources, True
        self._limit, self._may_branch = limit, may_branch
        self._rows: dict[int, DecodingRow] = {}  # by the sequence's key

    def note_worker(self, *, is_up: bool) -> bool:
        """Let rows have draft tokens from the draft worker if it *is_up*; return whether that is a change."""
        was_up, self._worker_is_up = self._worker_is_up, is_up
        return was_up != is_up

    def are_newly_predicted(self, running: Seq[Sequence], decided: Container[int]) -> bool:
        """Whether a request of *running* has a prediction, and its key is not among those that were *decided* on."""
        return self.sources.predicts and any(
            one.key not in decided and one.is_decoding for one in running if one.request.prediction_token_ids
        )

    def of(self, running: Seq[Sequence]) -> dict[int, DecodingRow]:
        """Return those of *running* that decode, by the sequence's key."""
        if len(self._rows) > 2 * len(running) + 64:
            self._rows = {one.key: self._rows[one.key] for one in running if one.key in self._rows}
        rows = {sequence.key: self._row(sequence) for sequence in running if sequence.is_decoding}
        return rows if self._worker_is_up else {key: row.first(self.sources.worker) for key, row in rows.items()}

    def _row(self, sequence: Sequence) -> DecodingRow:
        row = self._rows.get(sequence.key)
        if row is None:
            limit = sequence.most_drafts(self._limit, may_branch=self._may_branch, at_first=True)
            may_draft = [self.sources.may_draft(source, sequence.request) for source in range(len(self.sources))]
            row = DecodingRow(
                tuple([limit * may for may in may_draft]), tuple([RequestAcceptance() for _ in may_draft])
            )
            self._rows[sequence.key] = row
        return row


class AcceptanceModel:
    """The estimate of one method, for up to *depth* draft tokens one after another.

    Rounds are counted by their numbers of tokens, and summed up by depth when estimates are made.
    """

    def __init__(self, depth: int) -> None:
        # Asked for: all tokens, those before which all were accepted, and those of the latter that were drafted.
        self._asked, self._tried, self._scored = ([0.0] * (depth + 1) for _ in range(3))
        self._drafted, self._accepted = ([0.0] * (depth + 1) for _ in range(2))
        self._num_trials, self._num_assumed = 0.0, PRIOR_TRIALS
        self._rates_D = np.full(depth, ASSUMED)
        self._drafted_D = np.ones(depth)
        self._usual = [ASSUMED * tried for tried in range(depth + 1)]  # accepted tokens, of so many tried

    @property
    def rates(self) -> Floats:
        """`[D]`, the probability of each depth that its token is accepted if all before it were."""
        return self._rates_D

    @property
    def drafted(self) -> Floats:
        """`[D]`, the share of the tokens asked for at each depth that were drafted: a method may find nothing."""
        return self._drafted_D

    def observe(self, request: RequestAcceptance, asked: int, drafted: int, accepted: int) -> None:
        """Add a round in which *drafted* of *asked* tokens were drafted and *accepted* of those accepted.

        A token that was asked for and not drafted counts as one that was not accepted.
        """
        tried = min(asked, accepted + 1)
        accepted = min(accepted, tried)
        weight = request.weight
        request.add(tried, accepted)
        self._tried[tried] += weight
        self._scored[min(tried, drafted)] += weight
        self._accepted[accepted] += weight
        self._asked[asked] += weight
        self._drafted[min(drafted, asked)] += weight
        self._num_trials += weight
        if self._num_trials > MEMORY_TRIALS:
            self._keep(0.5)

    def age(self) -> None:
        """Let the next drafts count more: there was none for a while, and the text may be another."""
        share = min(1.0, AGED_TRIALS / max(self._num_trials, 1.0))
        self._keep(share)
        self._num_assumed = max(LEAST_ASSUMED, share * self._num_assumed)

    def _keep(self, share: float) -> None:
        for counts in (self._asked, self._tried, self._scored, self._drafted, self._accepted):
            counts[:] = [count * share for count in counts]
        self._num_trials *= share

    def refresh(self) -> None:
        """Estimate the rates again. Called before decisions."""
        asked, drafted, prior = _by_depth(self._asked), _by_depth(self._drafted), self._num_assumed
        shares = [(some + prior) / (all_ + prior) for some, all_ in zip(drafted, asked, strict=True)]
        shares = list(accumulate(shares, min))
        goes_on = [1.0, *(share / before for before, share in pairwise(shares))]
        counts = zip(goes_on, *map(_by_depth, (self._tried, self._scored, self._accepted)), strict=True)
        rate, rates = ASSUMED, []  # of a token that is drafted, the probability that it is accepted
        for share, tried, scored, accepted in counts:
            rate = (accepted + prior * rate) / (scored + prior)
            rates.append(rate * (scored + prior * share) / (tried + prior))
            prior = PRIOR_TRIALS
        self._drafted_D, self._rates_D = np.array(shares), np.array(rates)
        self._usual = list(accumulate(rates, initial=0.0))

    def survival(self, requests: Seq[RequestAcceptance]) -> Floats:
        """Return `[R, D]`: the probability that the first d + 1 draft tokens of each row are all accepted.

        The odds of the method's rates are multiplied by how much better or worse the request did than expected.
        """
        factor_R1 = np.array([[one.factor(self._usual)] for one in requests])
        odds_RD = np.array([_odds(rate) for rate in self._rates_D.tolist()]) * factor_R1
        survival_RD: Floats = np.cumprod(odds_RD / (1 + odds_RD), axis=1)
        return survival_RD


def _odds(rate: float) -> float:
    kept = min(max(rate, 1e-4), 1 - 1e-4)
    return kept / (1 - kept)


def _by_depth(counts: list[float]) -> list[float]:
    """Return how many of the rounds had a token at each depth; *counts* are by the number of tokens."""
    return list(accumulate(counts[:0:-1]))[::-1]
