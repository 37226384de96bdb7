"""Acceptance rates recover: after a restart of the draft, and with blocks that the draft never computed.

Each test compares the same positions of the same texts, with and without the disturbance.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import pytest

from protos.messages import Request, Sampling
from protos.sampling import SamplingParams
from tests.support.distributed.engine import Engine, Models, configure, late_comer, quick_turns, threaded, tiny_pair
from tests.support.processes import wait_until

BLOCK = 4
PREFIX = 40
FLOOR_S = 60.0
"""A deadline in seconds that no draft misses here."""
ROOMY = 600
"""KV blocks; more than four requests need."""


@dataclass(frozen=True)
class Size:
    """The size of a run, and the allowed relative difference in acceptance.

    What is left are rounds that begin at other positions; that evens out over many.
    """

    requests: int
    tokens: int
    band: float

    @property
    def tight(self) -> int:
        """KV blocks for two requests, where four may run."""
        return 2 * (self.tokens + 2 * BLOCK) // BLOCK


SIZES = [
    pytest.param(Size(requests=8, tokens=32, band=0.25), id="quick"),
    pytest.param(Size(requests=80, tokens=90, band=0.05), id="full", marks=pytest.mark.full),
]


class Judged(NamedTuple):
    """A row with draft tokens: its request, its number of known tokens, and the result."""

    request_id: str
    known_len: int
    proposed: int
    accepted: int


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return tiny_pair(tmp_path_factory.mktemp("models"), noise=0.015)


@pytest.fixture(autouse=True)
def _quick_turns() -> Iterator[None]:
    with quick_turns():
        yield


def requests(size: Size, family: str = "", shared: int = 0) -> list[Request]:
    """Return sampled and greedy requests with different prompts; the first *shared* are equal within a family."""
    return [
        Request(
            request_id=f"{family}{i}",
            params=SamplingParams(),
            sampling=Sampling(i, float(i % 2)),
            max_tokens=size.tokens,
            prompt_token_ids=(
                *[(i * 31 + j * (i + 7)) % 96 for j in range(shared)],
                *(ord(letter) % 96 for letter in family),
                i % 90,
                i // 90,
                5,
                6 + i % 11,
            ),
        )
        for i in range(size.requests)
    ]


def judged(engine: Engine, asked: Seq[Request]) -> list[Judged]:
    """Return the results of all rows with draft tokens, in order."""
    names = {request.prompt_token_ids: request.request_id for request in asked}
    owner: dict[int, str] = {}
    found = []
    for plan, verdicts in engine.rounds:
        owner.update({new.slot: names[tuple(new.token_ids[: new.prompt_len])] for new in plan.new})
        by_slot = {verdict.slot: verdict for verdict in verdicts}
        found += [
            Judged(owner[row.slot], row.known_len, by_slot[row.slot].proposed, len(by_slot[row.slot].path))
            for row in plan.rows
            if row.k
        ]
    return found


def rate(rows: Seq[Judged], since: Mapping[str, int]) -> float:
    """Return the share of draft tokens accepted, for the requests in *since* from that many known tokens on."""
    counted = [row for row in rows if row.known_len >= since.get(row.request_id, 1 << 30)]
    proposed = sum(row.proposed for row in counted)
    assert proposed > 0
    return sum(row.accepted for row in counted) / proposed


def assert_restored(rows: Seq[Judged], undisturbed: Seq[Judged], since: Mapping[str, int], band: float) -> None:
    mine, theirs = rate(rows, since), rate(undisturbed, since)
    print(f"acceptance {mine:.3f}, undisturbed {theirs:.3f}")
    assert 0.2 < theirs < 0.95
    assert abs(mine - theirs) <= band * theirs
    latest = [row for row in rows if row.request_id in since][-len(since) :]
    assert sum(row.proposed > 0 for row in latest) >= 0.8 * len(latest), "the draft never caught up"


Start = Callable[..., Engine]


@pytest.fixture
def start(models: Models) -> Iterator[Start]:
    started: list[Engine] = []

    def start(may_come: threading.Event | None = None, num_blocks: int = ROOMY, **arguments: Any) -> Engine:
        config = configure(
            models,
            num_gpu_blocks_override=num_blocks,
            block_size=BLOCK,
            max_num_batched_tokens=64,
            max_model_len=160,
            **arguments,
        )
        body = None if may_come is None else late_comer(may_come, FLOOR_S)
        started.append(threaded(config, floor_s=FLOOR_S, body=body))
        return started[-1]

    yield start
    for engine in started:
        engine.built.shutdown()


def lose_draft(engine: Engine) -> None:
    """Kill the draft between rounds; return once the loss is detected."""
    assert engine.workers is not None
    executor = engine.built.executor
    engine.workers.newest("draft").crash()

    def is_known() -> bool:
        executor.poll()
        return not executor.drafting.is_up

    wait_until(is_known)


def known(engine: Engine, asked: Seq[Request]) -> dict[str, int]:
    """Return the number of known tokens of each request, prompt included."""
    return {
        request.request_id: len(request.prompt_token_ids) + len(engine.outputs.get(request.request_id, ()))
        for request in asked
    }


@pytest.mark.parametrize("size", SIZES)
def test_after_the_draft_is_recreated(start: Start, size: Size) -> None:
    asked = requests(size)
    calm = start()
    calm.put(*asked)
    outputs = calm.finish()
    may_come = threading.Event()
    engine = start(may_come)
    engine.put(*asked)
    engine.until(lambda: engine.num_out >= size.requests * size.tokens // 5)
    lose_draft(engine)
    lost = len(engine.rounds)
    engine.until(lambda: len(engine.rounds) > lost + 8)
    may_come.set()
    engine.until_drafting(epoch=2)
    since = known(engine, asked)
    assert engine.finish() == outputs
    assert engine.changes == {"started": 1, "lost": 1, "revived": 1}
    assert_restored(judged(engine, asked), judged(calm, asked), since, size.band)


@pytest.mark.parametrize("size", SIZES)
def test_after_prefix_hits_on_blocks_made_while_it_was_away(start: Start, size: Size) -> None:
    makers = [msgspec.structs.replace(request, max_tokens=2) for request in requests(size, "a", PREFIX)]
    readers = requests(size, "b", PREFIX)
    room = ROOMY + size.requests * (PREFIX + size.tokens + 2 * BLOCK) // BLOCK  # no prefix is ever given up
    calm = start(num_blocks=room)
    for asked in (makers, readers):
        calm.put(*asked)
        calm.finish()
    may_come = threading.Event()
    engine = start(may_come, num_blocks=room)
    lose_draft(engine)
    engine.put(*makers)
    engine.finish()
    assert engine.proposed() == 0
    may_come.set()
    engine.until_drafting(epoch=2)
    hits = engine.built.controller.stats().prefix_hits
    engine.put(*readers)
    assert engine.finish() == calm.outputs
    assert engine.built.controller.stats().prefix_hits - hits >= size.requests * PREFIX
    everyone = [*makers, *readers]
    since = {request.request_id: 0 for request in readers}
    assert_restored(judged(engine, everyone), judged(calm, everyone), since, size.band)


@pytest.mark.parametrize("size", SIZES)
def test_after_preemption(start: Start, size: Size) -> None:
    asked = requests(size)
    calm = start()
    calm.put(*asked)
    outputs = calm.finish()
    engine = start(num_blocks=size.tight)
    engine.put(*asked)
    assert engine.finish() == outputs
    assert calm.built.controller.stats().preemptions == 0
    assert engine.built.controller.stats().preemptions >= max(1, size.requests // 10)
    since = {request.request_id: 0 for request in asked}
    assert_restored(judged(engine, asked), judged(calm, asked), since, size.band)
