"""Measured acceptance: the probability that the first d draft tokens of a row are all accepted, for each depth d.

What a round shows is used from the next round on. All methods of an engine share one estimate for each method; each
request has a deviation from it, which is small as long as little of the request was seen.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

ASSUMED = 0.7
"""Acceptance of a typical trained draft of the same family, before anything was measured."""
PRIOR_TRIALS = 4.0
"""Weight of the assumption for depth 1, and of the estimate for the depth before for each further depth, in trials."""
MEMORY_TRIALS = 200.0
"""When so many first draft tokens were tried, half of what was seen is forgotten."""
REQUEST_PRIOR = 6.0
"""Weight of the method's estimate in that for a request, in trials."""
REQUEST_MEMORY = 0.95
"""Share of a request's trials that each of its drafts keeps: its text changes."""


@dataclass(slots=True)
class RequestAcceptance:
    """What one request showed: draft tokens that were tried, those accepted, and those expected to be.

    A draft token is tried if all before it were accepted.
    """

    tried: float = 0.0
    accepted: float = 0.0
    expected: float = 0.0

    def add(self, tried: int, accepted: int, expected: float) -> None:
        """Add a draft, and forget a part of those before."""
        self.tried = REQUEST_MEMORY * self.tried + tried
        self.accepted = REQUEST_MEMORY * self.accepted + accepted
        self.expected = REQUEST_MEMORY * self.expected + expected


class AcceptanceModel:
    """The estimate of one method, for up to *depth* draft tokens one after another."""

    def __init__(self, depth: int) -> None:
        self._tried_D = np.zeros(depth)
        self._accepted_D = np.zeros(depth)
        self._rates_D = np.full(depth, ASSUMED)

    @property
    def rates(self) -> Floats:
        """`[D]`, the probability of each depth that its token is accepted if all before it were."""
        return self._rates_D

    @property
    def num_tried(self) -> float:
        """Remembered trials of the first draft token."""
        return float(self._tried_D[0])

    def observe(self, request: RequestAcceptance, depth: int, accepted: int) -> None:
        """Add a draft of *depth* levels of which *accepted* were accepted."""
        tried = min(depth, accepted + 1, len(self._tried_D))
        accepted = min(accepted, tried)
        request.add(tried, accepted, float(self._rates_D[:tried].sum()))
        self._tried_D[:tried] += 1
        self._accepted_D[:accepted] += 1
        if self._tried_D[0] > MEMORY_TRIALS:
            self._tried_D *= 0.5
            self._accepted_D *= 0.5

    def refresh(self) -> None:
        """Estimate the rates again. Called once a round."""
        before = ASSUMED
        for depth, (tried, accepted) in enumerate(zip(self._tried_D.tolist(), self._accepted_D.tolist(), strict=True)):
            before = (accepted + PRIOR_TRIALS * before) / (tried + PRIOR_TRIALS)
            self._rates_D[depth] = before

    def survival(self, requests: Seq[RequestAcceptance]) -> Floats:
        """Return `[R, D]`: the probability that the first d + 1 draft tokens of each row are all accepted.

        The odds of the method's rates are multiplied by how much better or worse the request did than expected.
        """
        seen_R3 = np.array([(one.tried, one.accepted, one.expected) for one in requests], np.float64).reshape(-1, 3)
        tried_R, accepted_R, expected_R = (seen_R3[:, column] for column in range(3))
        mean = float(self._rates_D[0])
        trials_R = tried_R + REQUEST_PRIOR
        found_R = (accepted_R + REQUEST_PRIOR * mean) / trials_R
        usual_R = (expected_R + REQUEST_PRIOR * mean) / trials_R
        factor_R = _odds(found_R) / _odds(usual_R)
        odds_RD = _odds(self._rates_D)[None, :] * factor_R[:, None]
        survival_RD: Floats = np.cumprod(odds_RD / (1 + odds_RD), axis=1, dtype=np.float64)
        return survival_RD


def _odds(rates: Floats) -> Floats:
    kept = np.clip(rates, 1e-4, 1 - 1e-4)
    return kept / (1 - kept)
