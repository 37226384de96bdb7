"""Requests of a fleet: sessions with a common beginning each, arriving at random."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

BLOCK_TOKENS = 64
"""Tokens of a prefix that the router tells apart: about `cluster.ray_serve.affinity.BLOCK_CHARS` characters."""


@dataclass(slots=True)
class FleetRequest:
    """One request, and what became of it.

    Attributes:
        name: its id.
        arrives: seconds from the beginning.
        prompt: tokens of its prompt.
        output: tokens of its answer.
        keys: of the prefixes of its prompt, `BLOCK_TOKENS` longer each.
        first: when its first token came; None before that.
        ended: when its last token came; None before that.
        cached: prompt tokens that a prefix cache held.
        replica: where it is or was answered.
        tries: how often it was sent: once more for each replica that was lost under it.
    """

    name: str
    arrives: float
    prompt: int
    output: int
    keys: Sequence[str] = ()
    first: float | None = None
    ended: float | None = None
    cached: int = 0
    replica: str = ""
    tries: int = 0

    @property
    def wait_s(self) -> float:
        """Seconds to the first token."""
        assert self.first is not None
        return self.first - self.arrives


@dataclass(frozen=True)
class Load:
    """What arrives.

    Attributes:
        rate: requests a second.
        count: requests in all.
        sessions: different beginnings; every request has one of them, all equally often.
        prefix, suffix: prompt tokens that a session's requests share, and own ones.
        output: mean tokens of an answer; they are between half of it and one and a half.
        seed: of arrivals, sessions and lengths.
    """

    rate: float
    count: int
    sessions: int
    prefix: int = 512
    suffix: int = 64
    output: int = 64
    seed: int = 0

    def make(self) -> list[FleetRequest]:
        """Return the requests by arrival; intervals are exponential."""
        dice = random.Random(self.seed)
        made, now = [], 0.0
        for number in range(self.count):
            now += dice.expovariate(self.rate)
            session = dice.randrange(self.sessions)
            keys = [f"{session}.{block}" for block in range(self.prefix // BLOCK_TOKENS)]
            output = dice.randint(max(1, self.output // 2), max(1, self.output * 3 // 2))
            made.append(FleetRequest(str(number), now, self.prefix + self.suffix, output, keys))
        return made
