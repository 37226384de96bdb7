"""Draft channels replace each other: one is left before the next is formed."""

import threading
import time
from dataclasses import dataclass, field

from protos.worker_messages import DraftChannelReady, FormDraftChannel, FromWorker, StoreAddress
from workers.draft.channel import DraftChannels


@dataclass
class End:
    epoch: int
    closed: threading.Event = field(default_factory=threading.Event)

    def close(self) -> None:
        self.closed.set()


def test_a_pair_is_left_before_the_next_is_formed() -> None:
    ends = {epoch: End(epoch) for epoch in (1, 2)}
    sent: list[FromWorker] = []
    may_join = threading.Event()

    def join(order: FormDraftChannel) -> End:
        assert order.epoch == 1 or may_join.wait(10)
        return ends[order.epoch]

    def wait_for(count: int) -> None:
        until = time.monotonic() + 10
        while len(sent) < count and time.monotonic() < until:
            time.sleep(0.001)

    channels = DraftChannels(sent.append, join)
    store = StoreAddress("127.0.0.1", 1)
    channels.form(FormDraftChannel(1, store))
    wait_for(1)
    assert channels.end(1) is ends[1]
    assert channels.end(2) is None
    channels.form(FormDraftChannel(2, store))
    assert ends[1].closed.is_set()
    assert channels.end(1) is None
    may_join.set()
    wait_for(2)
    assert channels.end(2) is ends[2]
    channels.close()
    assert ends[2].closed.is_set()
    assert sent == [DraftChannelReady(1), DraftChannelReady(2)]
