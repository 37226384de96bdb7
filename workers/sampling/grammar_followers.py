"""The processes that follow grammars, and the questions that they have not answered yet. Nothing here blocks.

Each grammar has a process of its own, so a slow one delays no other. Sequences of one grammar share it.
"""

import logging
import os
from collections import OrderedDict, deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cached_property

import msgspec

from protos.grammars.host import GrammarHost, GrammarProcess, HostEndedError, wait_for
from protos.guidance import GrammarError
from protos.messages import Grammar
from workers.sampling.grammar_process import Begin, Follow, Followed

logger = logging.getLogger(__name__)

MODULE = "workers.sampling.grammar_process"
MAX_IDLE = 32
"""Processes kept for grammars that no sequence has now."""
MEMORY_BYTES = 1 << 29
"""Limit on a process, in addition to the vocabulary."""
NUM_SHARES = max(1, min(4, (os.cpu_count() or 1) // 4))
"""Processes among which the sequences of one grammar are divided."""
FAILED = "the grammar failed; the target's log has the reason"

Key = tuple[Grammar, int]


class Follower:
    """One process, the numbers of the sequences that use it, and those whose questions it has not answered."""

    def __init__(self, process: GrammarProcess) -> None:
        self.process = process
        self.users: set[int] = set()
        self.asked: deque[int] = deque()
        self.ended: list[int] = []
        self._gives_way = False

    def ask(self, question: Follow) -> None:
        """Send a question."""
        self.asked.append(question.sequence)
        ended, self.ended = self.ended, []
        self.process.send(msgspec.structs.replace(question, ended=ended) if ended else question)

    def take(self) -> Followed | None:
        """Return the next answer; None if there is none yet."""
        answer = self.process.take(Followed)
        if answer is not None and answer.is_last:
            self.asked.popleft()
        return answer

    def give_way(self) -> None:
        """Let other processes go first from now on."""
        if not self._gives_way:
            self._gives_way = True
            self.process.give_way()


class Followers:
    """The followers of one target. Not thread-safe.

    Args:
        host: starts the processes.
        vocab_size: number of ids that may be sampled.
        budget_s: of each sequence, in seconds of a processor.
    """

    def __init__(self, host: GrammarHost, vocab_size: int, budget_s: float) -> None:
        self._host, self._vocab_size, self._budget_s = host, vocab_size, budget_s
        self._by_key: OrderedDict[Key, Follower] = OrderedDict()
        self._starting: Future[None] | None = None

    @cached_property
    def _starter(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "grammar-start")

    def load(self) -> None:
        """Begin to read the vocabulary, in a process that a thread starts."""
        if self._starting is None and not self._host.is_ready:
            self._starting = self._starter.submit(self._host.start)

    def find(self, grammar: Grammar, sequence: int) -> Follower | None:
        """Return the process for a sequence of *grammar*; None if the vocabulary is still being read.

        Raises:
            GrammarError: the vocabulary cannot be used.
            RuntimeError: it could not be read; the log has the reason. The next call tries again.
        """
        key = (grammar, sequence % NUM_SHARES)
        follower = self._by_key.get(key)
        if follower is None:
            follower = self._start(grammar)
        if follower is not None:
            self._by_key[key] = follower
            self._by_key.move_to_end(key)
            follower.users.add(sequence)
        return follower

    def _start(self, grammar: Grammar) -> Follower | None:
        self._raise_if_not_started()
        self.load()
        if not self._host.is_ready:
            return None
        try:
            follower = Follower(self._host.fork())
        except HostEndedError:
            self.load()
            return None
        follower.process.send(Begin(grammar, self._vocab_size, self._budget_s))
        self._forget_idle()
        return follower

    def _raise_if_not_started(self) -> None:
        if self._starting is None or not self._starting.done():
            return
        error, self._starting = self._starting.exception(), None
        if isinstance(error, GrammarError):
            raise error
        if error is not None:
            logger.error("a grammar failed", exc_info=error)
            raise RuntimeError(FAILED)

    def _forget_idle(self) -> None:
        idle = [key for key, follower in self._by_key.items() if not follower.users]
        for key in idle[: max(0, len(idle) - MAX_IDLE)]:
            self._by_key.pop(key).process.end()

    def leave(self, follower: Follower, sequence: int) -> None:
        """Note that *sequence* is over. What is still computed for it alone is given up with its process."""
        follower.users.discard(sequence)
        follower.ended.append(sequence)
        if follower.asked and not follower.users:
            self.drop(follower)

    def drop(self, follower: Follower) -> None:
        """End a process; its sequences find another."""
        follower.process.end()
        for key in [key for key, each in self._by_key.items() if each is follower]:
            del self._by_key[key]

    def wait(self, followers: Iterable[Follower], timeout_s: float) -> None:
        """Wait until one of *followers* has answered; without any, for the vocabulary."""
        processes = [each.process for each in followers]
        if processes:
            wait_for(processes, timeout_s)
        elif self._starting is not None:
            wait([self._starting], timeout_s)
