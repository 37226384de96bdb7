"""What is learnt of other draft tokens than those that pay.

While speculation is on, other numbers of draft tokens are tried. Rows without any have drafts looked up that are not
scored, and compared with the tokens that come: a request may begin to repeat itself, or another one. Drafts from the
controller process cost the target nothing as long as it does not score them. The draft worker's take time to make.
"""

import math
import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from protos.draft import Draft, TreePath
from protos.messages import Verdict, with_tree
from runtime.core.sequence import Sequence
from runtime.policy.base import FinishedStep, Share
from runtime.policy.cost_model import RoundCosts

if TYPE_CHECKING:
    from runtime.policy.acceptance import DecodingRow, DecodingRows
    from runtime.policy.choosers import Chooser, Chosen

EXPLORE_EVERY, DOUBT_EVERY = 50, 16
"""While speculation is on, other numbers of draft tokens are tried after so many rounds, and after so many at least."""
MOST_DOUBLED = 3
"""How often that is doubled at most: once whenever another was tried, until what pays is another."""
LOST = 0.5
"""Of the seconds by which more draft tokens make a round longer, the share that trying more or fewer is taken to cost:
the tokens that they bring or that are missing are not known beforehand. Against plain rounds all of it is."""
EXPLORED_ROUNDS, EXPLORED_PLAIN = 8, 4
"""Each is tried for so many rounds in a row, and none for so many. The last of them show what it costs: after rounds of
another size the first ones take longer."""
CLEAR_GAIN, PLAIN_SHARE, CLEAR_SHARE = 1.25, 0.5, 0.1
"""The share of the times in which none is tried, with gains up to this one and above: there, what plain rounds cost
decides nothing."""
NEAR = 1.5
"""Of the other numbers, two of three are larger or smaller by this factor: what these cost decides between them."""

LOOKING = Share(0.002, 1024)
"""How often drafts are looked up that are not scored."""
FEWEST_ROUNDS = 8
"""They are looked up in one of so many rounds at most."""
MOST_ROWS = 64
"""For at most so many rows at once."""

LookUp = Callable[[Seq[Sequence], int], list[tuple[int, Draft] | None]]
"""Looks up drafts of at most so many tokens in the controller process: the source of each, and the draft.

An empty draft has the source after the last that was asked. None: it cannot be known yet whether there is one."""


def loss(
    k: int, usual: int, num_rows: int, costs: RoundCosts, *, gain: float, catch_up_s: float, usual_s: float = math.inf
) -> float:
    """Return the seconds that a round with *k* draft tokens for each row loses against one with the *usual* number.

    *gain* is that of the usual number over plain decoding. After plain rounds the draft catches up in *catch_up_s*.
    *usual_s* is what usual rounds take. Where most rows do not draft, that is much less than if all of them did; for
    the part of those that do not, all that drafting adds is lost.
    """
    if not k:
        return max(0.0, (gain - 1) * costs.plain() + catch_up_s)
    plain_s, others_s, all_s = costs.plain(), costs.uniform(k, num_rows), costs.uniform(usual, num_rows)
    if not usual:
        return abs(others_s - plain_s)
    drafting = min(1.0, max(0.0, usual_s - plain_s) / max(all_s - plain_s, 1e-9))
    return LOST * drafting * abs(others_s - all_s) + (1 - drafting) * max(0.0, others_s - plain_s)


def lost_in(step: FinishedStep, seconds: float, plain_s: float) -> float:
    """Return the seconds that a *step* of so many *seconds* lost against plain rounds, which take *plain_s*."""
    if not step.plan.decodes:
        return step.draft_s  # prompts take long anyway
    return seconds - plain_s * step.num_tokens / max(1, len(step.plan.rows))


def num_explored(k: int) -> int:
    """Return for how many rounds *k* draft tokens are tried."""
    return EXPLORED_ROUNDS if k else EXPLORED_PLAIN


class Exploration:
    """In which rounds another number of draft tokens is tried than the one that pays, so that its cost stays known.

    It is one of *sizes*, which ascend, or none, for several rounds now and then; none earlier if its cost is in doubt.
    """

    def __init__(self, sizes: Seq[int]) -> None:
        self._sizes = sizes
        self._random = random.Random(0)
        self._num_rounds = 0  # since the last time
        self._is_on = self._is_in_doubt = False
        self._since_plain = math.inf  # rounds since none were tried
        self._usual = self._num_alike = 0  # what pays, and how often others were tried since it does
        self._last = 0  # what was tried last, but for none
        self._next: int | None = None

    @property
    def _every(self) -> int:
        return EXPLORE_EVERY << min(MOST_DOUBLED, self._num_alike)

    @property
    def is_due(self) -> bool:
        """Whether it should begin in this round."""
        return self._is_on and self._num_rounds >= (DOUBT_EVERY if self._is_in_doubt else self._every)

    @property
    def paid(self) -> bool:
        """Whether draft tokens come back after rounds without that were tried: these paid for what the draft missed."""
        return self._since_plain <= EXPLORED_PLAIN + 1

    def count(self, num_rounds: int, *, is_on: bool) -> None:
        """Count rounds, if speculation is on in them."""
        self._is_on = is_on
        self._num_rounds += num_rounds * is_on
        self._since_plain += num_rounds

    def doubt(self, gain: float) -> None:
        """Note that the cost of plain rounds is in doubt, if it decides anything at this *gain*."""
        self._is_in_doubt |= gain <= CLEAR_GAIN

    def choose(self, usual: int, gain: float) -> int:
        """Return the number of draft tokens to try instead of the *usual*: the same one until it begins.

        If it does not begin in this round, since it costs too much, it is due again a little later.
        """
        if usual != self._usual:
            self._usual, self._num_alike, self._next = usual, 0, None
        if self._is_in_doubt:
            self._num_rounds, self._is_in_doubt = 0, False
            return 0
        self._num_rounds -= DOUBT_EVERY
        if self._next is None:
            self._next = self._draw(usual, gain)
        return self._next

    def _draw(self, usual: int, gain: float) -> int:
        sizes = self._sizes
        less = max([size for size in sizes if size <= usual / NEAR], default=sizes[0])
        more = min([size for size in sizes if size >= usual * NEAR], default=sizes[-1])
        others = {less, more, self._random.choice(sizes)} - {usual}
        others = others - {self._last} or others
        is_plain = self._random.random() < (PLAIN_SHARE if gain <= CLEAR_GAIN else CLEAR_SHARE)
        return 0 if is_plain or not others else self._random.choice(sorted(others))

    def begin(self, k: int) -> None:
        """Begin to try *k* draft tokens."""
        self._num_rounds, self._next, self._since_plain = 0, None, math.inf if k else 0
        if k:
            self._num_alike, self._last = self._num_alike + 1, k


@dataclass(frozen=True)
class _Unscored:
    sequence: Sequence
    num_tokens: int  # of the sequence, when the draft was looked up
    source: int
    draft: Draft

    def verdict(self, limit: int) -> Verdict | None:
        """Compare the draft with the tokens that came; None if these are fewer than *limit*."""
        came = self.sequence.token_ids[self.num_tokens : self.num_tokens + limit]
        if len(came) < limit:
            return None
        path = TreePath(self.draft)
        for token in came:
            if not path.extend(token):
                break
        return with_tree(Verdict(self.sequence.slot, proposed=len(self.draft), path=path.nodes), self.draft)


class Hindsight:
    """Looks up drafts now and then that are not scored, and later learns from them as from others.

    Args:
        look_up: looks up drafts; None: there are none.
        limit: most draft tokens of a row.
        chooser: learns.
        rows: of all requests.
        clock: seconds.

    Attributes:
        promises: whether a token of the last drafts was right.
    """

    def __init__(
        self, look_up: LookUp | None, limit: int, chooser: "Chooser", rows: "DecodingRows", clock: Callable[[], float]
    ) -> None:
        self._look_up, self._limit, self._clock = look_up, limit, clock
        self._chooser, self._rows = chooser, rows
        self._unscored: list[_Unscored] = []
        self._num_left = self._num_looked = 0
        self.promises = False

    @property
    def is_current(self) -> bool:
        """Whether it is known what drafts would bring that are not scored: all are looked up, or the last promise."""
        return self.promises or (self._look_up is not None and not self._rows.sources.has_worker)

    def look_if_due(self, running: Seq[Sequence], chosen: "Chosen", round_s: float) -> bool:
        """Count a round. Now and then, learn from the last drafts, and look up new ones.

        They are for rows that get none by what is *chosen*. Rounds take *round_s* seconds, 0 if that is unknown.

        Returns:
            Whether drafts were compared in this round that promise something.
        """
        self._num_left -= 1
        if self._num_left >= 0 or self._look_up is None:
            return False
        began = self._clock()
        rows = self._rows.of(running)
        idle = {one.key: one for one in running if one.key in rows and not any(chosen.of(one.key))}
        were_right = [self._learn(one, rows[one.sequence.key]) for one in self._unscored if one.sequence.key in idle]
        self.promises = any(were_right)
        next_ = self._next_of(list(idle.values()))
        found = zip(next_, self._look_up(next_, self._limit) if next_ else [], strict=True)
        self._unscored = [_Unscored(one, len(one.token_ids), *draft) for one, draft in found if draft is not None]
        spent_s = self._clock() - began
        self._num_left = max(FEWEST_ROUNDS - 1, self._limit - 1, LOOKING.pause(spent_s, round_s))
        return self.promises

    def _next_of(self, idle: list[Sequence]) -> list[Sequence]:
        """Return those of *idle* for which drafts are looked up now: each in its turn."""
        if len(idle) <= MOST_ROWS:
            return idle
        first = self._num_looked % len(idle)
        self._num_looked += MOST_ROWS
        return (idle[first:] + idle[:first])[:MOST_ROWS]

    def _learn(self, one: _Unscored, row: "DecodingRow") -> bool:
        """Learn from a draft if the request wants such drafts, and enough tokens came; return whether one was right."""
        asked, verdict = self._rows.sources.looked_up(row.limits), one.verdict(self._limit)
        if verdict is None or not any(asked):
            return False
        self._chooser.record(verdict, row, asked, one.source)
        return len(verdict.path) > 0
