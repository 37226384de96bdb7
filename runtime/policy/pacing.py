"""In which rounds the adaptive policy works: what it does takes too long for every round."""

from collections import deque
from collections.abc import Sequence as Seq
from enum import Enum, auto
from typing import NamedTuple

from runtime.core.sequence import Sequence
from runtime.policy.base import WARMING_ROUNDS, FinishedStep, Share, is_other_load

LEARNT_ROWS = 32
"""Acceptance is learnt of idle rounds with at most so many rows together."""
SETTLING_ROUNDS = 8
"""Without draft tokens another load is no reason to decide in so many rounds: while requests come or leave together,
there is one after another."""
TYPICAL_OF, TYPICAL_FEWEST = 5, 3
"""What a round costs is learnt from the one of median seconds of the last idle ones, if there were as many. Rounds in
which the policy works are slower: it evicts what the models have in the processor's caches."""
RENEWED_ROUNDS = 16
"""Without draft tokens it is decided anew after so many rounds if half of the requests came since: those that it was
decided for may have been hard to predict."""


class RoundKind(Enum):
    """What the adaptive policy does in a round."""

    FIRST = auto()
    """One of the engine's first rounds: all but the last few draft, whether it seems to pay or not."""
    TRIAL = auto()
    """Try drafts while speculation is off."""
    EXPLORE = auto()
    """Try another number of draft tokens than the one that pays; if that costs too much now, decide."""
    DECIDE = auto()
    """Decide anew."""
    KEPT = auto()
    """Keep the last decision."""
    IDLE = auto()
    """Keep it, too, and do nothing else: what such rounds show is learnt together, later."""

    @property
    def tries(self) -> bool:
        """Whether it tries what is not known to pay."""
        return self in (RoundKind.FIRST, RoundKind.TRIAL, RoundKind.EXPLORE)

    def stays(self, following: "RoundKind", *, is_idle: bool) -> bool:
        """Whether the round after a plain one of this kind is plain, too, as far as is known.

        After an idle one: if it *is_idle*. After others: if *following*, its kind, keeps what was decided, or both are
        of the engine's first rounds.
        """
        if self is RoundKind.IDLE:
            return is_idle
        return following is RoundKind.KEPT or self is following is RoundKind.FIRST


class RunningLoad(NamedTuple):
    """So many running sequences, of which the last has this key."""

    num_running: int = 0
    last_key: int = -1

    @staticmethod
    def of(running: Seq[Sequence]) -> "RunningLoad":
        """Return the load of *running*."""
        return RunningLoad(len(running), running[-1].key if running else -1)

    def is_other(self, running: Seq[Sequence]) -> bool:
        """Whether *running* are another load."""
        return is_other_load(self.num_running, len(running))

    def is_renewed(self, running: Seq[Sequence]) -> bool:
        """Whether at least half of *running* came since: they are in order of arrival."""
        return len(running) > 0 and running[len(running) // 2].key > self.last_key


DECIDING = Share(0.003, 64), Share(0.0005, 256)
"""How often it is decided how many draft tokens there are, with draft tokens and without."""
LEARNING = Share(0.003, 64), Share(0.0005, 128)
"""How often acceptance and costs are learnt, with draft tokens and without."""


class Pace:
    """In which rounds work is done that takes too long for every round. It is due in the first one."""

    def __init__(self) -> None:
        self._num_left = self._num_waited = 0
        self._seconds = 0.0  # of the last time

    @property
    def is_due(self) -> bool:
        """Whether it is done in this round."""
        return self._num_left <= 0

    def skip(self, num_rounds: int = 1) -> None:
        """Count rounds without it."""
        self._num_left -= num_rounds
        self._num_waited += num_rounds

    def advance(self) -> None:
        """Let it be due at once."""
        self._num_left = 0

    def wait(self, num_rounds: int) -> None:
        """Let it be due after *num_rounds*."""
        self._num_left = num_rounds

    def done(self, seconds: float, round_s: float, share: Share, *, most: int = 0) -> None:
        """Count a round in which it was done and took *seconds*, where rounds take *round_s*, 0 if that is unknown.

        It is due after *most* rounds at the latest, unless that is 0.
        """
        self._seconds, self._num_waited = seconds, 0
        num_left = share.pause(seconds, round_s)
        self._num_left = min(num_left, most) if most else num_left

    def hasten(self, round_s: float, share: Share) -> None:
        """Let it be due as soon as *share* lets it, if that is earlier."""
        self._num_left = min(self._num_left, share.pause(self._seconds, round_s) - self._num_waited)

    @property
    def num_left(self) -> int:
        """Rounds until it is due."""
        return max(0, self._num_left)


class Starting:
    """The sequences that start in a round, which was decided before they came."""

    def __init__(self) -> None:
        self._keys: set[int] = set()
        self._num_running = 0

    def begin(self, running: Seq[Sequence]) -> None:
        """Begin a round of *running*."""
        self._num_running = len(running)
        self._keys.clear()

    def makes_other_load(self, sequence: Sequence, num_decided: int) -> bool:
        """Whether *sequence* starts, and those that did before it make another load than *num_decided* sequences."""
        if sequence.num_sent_tokens:
            return False
        self._keys.add(sequence.key)
        return num_decided > 0 and is_other_load(num_decided, self._num_running + len(self._keys))


class IdleRounds:
    """Rounds in which a policy has nothing to do. They are learnt of later.

    With draft tokens they are of the same requests, which all decode. Without, requests may come and leave, until it
    has been another load for a while, or most of them are others. Steps hold many objects, so only those that are
    learnt of are kept.

    Args:
        paces: of the policy's work. None of it is due in such rounds.

    Attributes:
        rounds: tokens and seconds of those since `end` was called last.
        learnt: the last steps of them, of which acceptance is learnt: with many rows, one step shows enough.
        last: the very last steps of them in which all rows decoded.
        is_predicted: whether a request had a prediction to follow when `end` was called last.
        is_renewed: whether they end since the requests are others.
    """

    def __init__(self, *paces: Pace, predicts: bool = False) -> None:
        self._paces, self._predicts = paces, predicts
        self.rounds: list[tuple[int, float]] = []
        self.last: deque[FinishedStep]
        self.learnt: deque[FinishedStep]
        self.end(())

    @property
    def num_rounds(self) -> int:
        """How many there were."""
        return len(self.rounds)

    @property
    def typical(self) -> FinishedStep | None:
        """The step of median seconds of the last ones; None if there were too few."""
        by_seconds = sorted(self.last, key=lambda step: step.seconds)
        return by_seconds[len(by_seconds) // 2] if len(by_seconds) >= TYPICAL_FEWEST else None

    @property
    def num_rows(self) -> int:
        """Rows of each of them if there are draft tokens, else of the round before them."""
        return self._load.num_running

    @property
    def seconds(self) -> float:
        """Seconds of all of them."""
        return sum([seconds for _, seconds in self.rounds])

    def end(self, running: Seq[Sequence]) -> None:
        """Begin a round of *running* that is not idle."""
        for pace in self._paces:
            pace.skip(self.num_rounds)
        self.is_renewed = False
        self._load, self.is_predicted = RunningLoad.of(running), self._are_predicted(running)
        self._decided: RunningLoad | None = None
        self._num_left = self._num_other = 0
        self.rounds = []
        self.learnt, self.last = deque(maxlen=0), deque(maxlen=TYPICAL_OF)

    def start(self, *, learns: bool, decided: RunningLoad | None = None) -> None:
        """Let the next rounds be idle until work is due, or sequences come or leave.

        These may where it was *decided* for a load that there are no draft tokens, until a request comes with a
        prediction.
        """
        self._num_left = min([pace.num_left for pace in self._paces])
        self._decided = decided
        self.learnt = deque(maxlen=learns * LEARNT_ROWS // max(1, self.num_rows))

    def stop(self) -> None:
        """Let the next round not be idle."""
        self._num_left = 0

    @property
    def goes_on_later(self) -> bool:
        """Whether the next round is idle, as far as is known."""
        return self._num_left > 0

    def goes_on(self, running: Seq[Sequence]) -> bool:
        """Count a round, and return whether it is idle."""
        self._num_left -= 1
        return self._num_left >= 0 and self._is_same_load(running)

    def _is_same_load(self, running: Seq[Sequence]) -> bool:
        if self._decided is None or self._are_predicted(running):
            return RunningLoad.of(running) == self._load
        self._num_other = self._num_other + 1 if self._decided.is_other(running) else 0
        self.is_renewed = self.num_rounds >= RENEWED_ROUNDS and self._decided.is_renewed(running)
        return self._num_other <= SETTLING_ROUNDS and not self.is_renewed

    def _are_predicted(self, running: Seq[Sequence]) -> bool:
        return self._predicts and any(one.request.prediction_token_ids for one in running)

    def add(self, step: FinishedStep) -> None:
        """Add an idle round."""
        self.rounds.append((step.num_tokens, step.seconds))
        self.learnt.append(step)
        if step.plan.decodes:
            self.last.append(step)


class Warming:
    """The first rounds with drafts after some without, and the first one without: they take longer than others."""

    def __init__(self) -> None:
        self._drafts = False
        self._num_alike = 0  # rounds in a row with drafts, or without

    @property
    def is_on(self) -> bool:
        """Whether this round is one."""
        return self._num_alike <= (WARMING_ROUNDS if self._drafts else 1)

    def count(self, *, drafts: bool, num_rounds: int = 1) -> None:
        """Count rounds, all of them with *drafts* or all without."""
        if num_rounds and drafts != self._drafts:
            self._num_alike, self._drafts = 0, drafts
        self._num_alike += num_rounds
