"""A simulated replica: an engine's continuous batching, with prompts in chunks and a prefix cache."""

import random
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.fleet.costs import ReplicaCosts
from benchmarks.fleet.trace import BLOCK_TOKENS, FleetRequest


@dataclass(frozen=True)
class ReplicaLimits:
    """Limits of an engine.

    Attributes:
        max_seqs: requests that run at once.
        max_tokens: tokens of a step.
        kv_tokens: tokens of the KV cache; running requests have all of theirs reserved, the rest keeps prefixes.
        k: draft tokens of a row in every step; 0: no speculation.
    """

    max_seqs: int = 16
    max_tokens: int = 256
    kv_tokens: int = 16_384
    k: int = 0


@dataclass(slots=True)
class RunningRow:
    """A request that runs: prompt tokens that are left to feed, and tokens of its answer that are left."""

    request: FleetRequest
    prompt: int
    output: int
    chunk: int = 0


class SimulatedReplica:
    """One replica. The caller has the clock: it calls `begin` and, so many seconds later, `end`.

    Args:
        name: for the router.
        costs: of steps.
        limits: of the engine.
        dice: decides what is accepted.
    """

    def __init__(self, name: str, costs: ReplicaCosts, limits: ReplicaLimits, dice: random.Random) -> None:
        self.name, self._costs, self._limits, self._dice = name, costs, limits, dice
        self.waiting: deque[FleetRequest] = deque()
        self.running: list[RunningRow] = []
        self.is_busy = False
        self.accepts = True
        self.steps = 0
        self._reserved = 0
        self._cached: OrderedDict[str, None] = OrderedDict()

    @property
    def load(self) -> int:
        """Requests that are here."""
        return len(self.waiting) + len(self.running)

    def begin(self) -> float:
        """Plan a step of what is here; return its seconds."""
        self._admit()
        left, tokens, drafting = self._limits.max_tokens, 0, 0
        for row in self.running:  # rows that decode go first
            if not row.prompt:
                drafting += 1
                tokens += 1 + self._limits.k
        left -= tokens
        for row in self.running:
            row.chunk = min(row.prompt, max(0, left))
            left -= row.chunk
            tokens += row.chunk
        self.steps += 1
        return self._costs.step_s(tokens, len(self.running), self._limits.k, drafting)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._limits.max_seqs:
            request = self.waiting[0]
            size = request.prompt + request.output
            if self.running and self._reserved + size > self._limits.kv_tokens:
                return
            self.waiting.popleft()
            self._reserved += size
            self._evict()
            request.cached = min(self._found(request.keys), request.prompt - 1)
            self.running.append(RunningRow(request, request.prompt - request.cached, request.output))

    def _found(self, keys: Sequence[str]) -> int:
        """Return the tokens of the longest cached prefix."""
        found = 0
        for key in keys:
            if key not in self._cached:
                break
            self._cached.move_to_end(key)
            found += BLOCK_TOKENS
        return found

    def _evict(self) -> None:
        room = max(0, self._limits.kv_tokens - self._reserved) // BLOCK_TOKENS
        while len(self._cached) > room:
            self._cached.popitem(last=False)

    def end(self, now: float) -> list[FleetRequest]:
        """End a step at *now*; return the requests that ended with it."""
        ended = []
        for row in self.running:
            if row.prompt:
                row.prompt -= row.chunk
                if row.prompt:
                    continue
                self._cached.update(dict.fromkeys(row.request.keys))
                row.request.first = now
                row.output -= 1
            else:
                row.output -= 1 + self._accepted(row.output - 1)
            if row.output <= 0:
                row.request.ended = now
                self._reserved -= row.request.prompt + row.request.output
                ended.append(row.request)
        if ended:
            self.running = [row for row in self.running if row.output > 0]
            self._evict()
        return ended

    def _accepted(self, most: int) -> int:
        """Draw the number of accepted draft tokens, *most* at most."""
        most, count = min(most, self._limits.k), 0
        while count < most and self._dice.random() < self._costs.acceptance:
            count += 1
        return count

    def lose(self) -> list[FleetRequest]:
        """Lose everything; return the requests that were here, as new."""
        lost = [*(row.request for row in self.running), *self.waiting]
        for request in lost:
            request.first, request.cached = None, 0
        self.running, self._reserved, self.accepts = [], 0, False
        self.waiting.clear()
        self._cached.clear()
        return lost
