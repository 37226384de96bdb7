"""Draft channels: how they are formed and replaced, and what their messages may be."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protos.worker_messages import (
    DraftChannelFailed,
    DraftChannelReady,
    Drafted,
    FormDraftChannel,
    FromWorker,
    StoreAddress,
)
from workers.distributed.groups import GroupError
from workers.distributed.store import open_store
from workers.draft import channel
from workers.draft.channel import DraftChannels, join_as_draft, join_as_target
from workers.draft.receiver import DraftReceiver
from workers.draft.sender import DraftSender
from workers.draft.wire import most_bytes, pack, unpack
from workers.draft_messages import DraftTable


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


@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 1000))
def test_a_table_is_the_same_after_its_message(rows: int, width: int, seed: int) -> None:
    table = np.random.default_rng(seed).integers(-(1 << 31), 1 << 31, (rows, width), np.int32)
    message = pack(table, Drafted(3, 1, 0.5))
    assert np.array_equal(unpack(message), table)
    assert len(message.ids) <= most_bytes(rows, width)


@pytest.mark.parametrize(("rows", "width", "size"), [(2, 3, 20), (2, 3, 28), (-2, -3, 24), (0, 3, 0), (1 << 40, 8, 24)])
def test_a_table_of_another_size_is_refused(rows: int, width: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"a draft table of round 7 has {size} bytes; {rows} rows of {width}"):
        unpack(DraftTable(Drafted(7, 1), rows, width, bytes(size)))


MAX_BYTES = 4096


def joined(sent: list[FromWorker]) -> tuple[DraftReceiver, DraftSender]:
    """Form both ends of a channel; messages to the controller are in *sent*."""
    _store, address = open_store()
    order = FormDraftChannel(1, address)
    with ThreadPoolExecutor(1) as pool:
        target = pool.submit(join_as_target, order, sent.append, torch.device("cpu"), 0.5, max_bytes=MAX_BYTES)
        sender = join_as_draft(order, lambda message: None)
        return target.result(), sender


def test_drafts_arrive_and_those_of_another_size_end_the_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[FromWorker] = []
    receiver, sender = joined(sent)
    table = np.arange(6, dtype=np.int32).reshape(2, 3)
    sender.post(table, 4, 0.1)
    arrived = receiver.collect(4, 3)
    assert arrived.table is not None
    assert np.array_equal(arrived.table, table)
    monkeypatch.setattr("workers.draft.sender.pack", lambda table, drafted: DraftTable(drafted, 2, 3, b"123"))
    sender.post(table, 5, 0.1)
    assert receiver.collect(5, 3).table is None
    assert sent == [
        DraftChannelFailed(1, "a draft table of round 5 has 3 bytes; 2 rows of 3 ids take 24"),
    ]
    sender.close()
    receiver.close()


def test_a_message_that_is_too_large_is_dropped_and_later_ones_arrive() -> None:
    sent: list[FromWorker] = []
    receiver, sender = joined(sent)
    sender.post(np.zeros((1, MAX_BYTES), np.int32), 1, 0.1)
    number, table, until = 1, None, time.monotonic() + 20
    while table is None and time.monotonic() < until:  # until the sender is connected again
        number += 1
        sender.post(np.full((1, 3), number, np.int32), number, 0.0)
        time.sleep(0.02)
        table = receiver.collect(number, 1).table
    assert table is not None
    assert table.tolist() == [[number] * 3]
    assert receiver.collect(1, 1).table is None
    assert not sent
    sender.close()
    receiver.close()


def test_a_draft_that_does_not_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "FORM_S", 0.2)
    _store, address = open_store()
    with pytest.raises(GroupError, match=r"draft channel 3: the draft did not connect to 127\.0\.0\.1 within 0 s"):
        join_as_target(FormDraftChannel(3, address), print, torch.device("cpu"), max_bytes=MAX_BYTES)
