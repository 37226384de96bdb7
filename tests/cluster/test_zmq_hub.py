"""The hub: typed messages both ways, over ipc and encrypted tcp; malformed ones are dropped."""

import threading
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import pytest
import zmq

from cluster.transport.zmq_hub import ZmqHub, ZmqPort, routing_id
from cluster.transport.zmq_sockets import Endpoint, connect
from protos.messages import RoundPlan, Row, Verdict
from protos.worker_messages import Allocate, Died, Heartbeat, Plan, Progress, RoundDone, Stop, WorkerId

TARGET, DRAFT = WorkerId("target"), WorkerId("draft")
PATIENCE_S = 10.0


@pytest.fixture(params=[None, "127.0.0.1"], ids=["ipc", "tcp"])
def hub(request: pytest.FixtureRequest) -> Iterator[ZmqHub]:
    hub = ZmqHub(request.param)
    hub.register(TARGET)
    yield hub
    hub.close()


@pytest.fixture
def port(hub: ZmqHub) -> Iterator[ZmqPort]:
    port = ZmqPort(hub.endpoint, TARGET)
    yield port
    port.close()


def raw(endpoint: Endpoint) -> "zmq.Socket[bytes]":
    socket = zmq.Context.instance().socket(zmq.PUSH)
    connect(socket, endpoint.reports, endpoint)
    return socket


def test_a_round_goes_there_and_back(hub: ZmqHub, port: ZmqPort) -> None:
    plan = Plan(RoundPlan(7, [Row(slot=0, start=3, length=1, known_len=4, k=2, new_token_ids=(5,))], epoch=2))
    port.send(Heartbeat("serving"))
    assert hub.receive(PATIENCE_S) == [(TARGET, Heartbeat("serving"))]
    hub.send(TARGET, plan)
    hub.receive(0.2)  # sends the queue if the worker has only now connected
    assert msgspec.json.encode(port.receive(PATIENCE_S)) == msgspec.json.encode(plan)
    port.send(RoundDone(7, [Verdict(0, [1, 2], 2, [0])], wait_s=0.5))
    ((worker, done),) = hub.receive(PATIENCE_S)
    assert (worker, done.round, done.wait_s) == (TARGET, 7, 0.5)
    assert (done.verdicts[0].token_ids, len(done.verdicts[0].path)) == ([1, 2], 1)


def test_messages_wait_until_their_worker_connects(hub: ZmqHub) -> None:
    hub.send(TARGET, Allocate(8, 64))
    hub.send(TARGET, Stop())
    port = ZmqPort(hub.endpoint, TARGET)
    assert hub.receive(0.5) == []  # the hub sends queued messages while it receives
    assert [port.receive(PATIENCE_S), port.receive(PATIENCE_S)] == [Allocate(8, 64), Stop()]
    assert port.receive(0.01) is None
    port.close()


def test_threads_may_all_send(hub: ZmqHub, port: ZmqPort) -> None:
    def talk(number: int) -> None:
        for index in range(50):
            port.send(Progress(f"{number}.{index}"))

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    got: list[str] = []
    while len(got) < 200 and (messages := hub.receive(PATIENCE_S)):
        got += [message.text for _, message in messages]
    for thread in threads:
        thread.join()
    assert sorted(got) == sorted(f"{n}.{i}" for n in range(4) for i in range(50))
    assert [text for text in got if text.startswith("2.")] == [f"2.{i}" for i in range(50)]  # each in its order


def test_what_cannot_be_read_is_dropped(hub: ZmqHub, port: ZmqPort) -> None:
    stranger = raw(hub.endpoint)
    for frames in (
        [b"nobody", b"x"],
        [routing_id(TARGET)],
        [routing_id(TARGET), b"\xc1"],
        [b""],
        [routing_id(TARGET), msgspec.msgpack.encode({"type": "Plan"})],
    ):
        stranger.send_multipart(frames)
    assert hub.receive(0.5) == []
    port.send(Progress("still here"))
    assert hub.receive(PATIENCE_S) == [(TARGET, Progress("still here"))]
    assert hub.num_dropped == 5
    stranger.close()


def test_messages_of_an_unregistered_worker_are_dropped(hub: ZmqHub, port: ZmqPort) -> None:
    replacement = WorkerId("target", incarnation=1)
    hub.unregister(TARGET)
    hub.register(replacement)
    port.send(Progress("from the grave"))
    hub.post(replacement, Died("for a test"))
    hub.send(TARGET, Stop())
    messages = hub.receive(PATIENCE_S) + hub.receive(0.3)
    assert messages == [(replacement, Died("for a test"))]
    assert port.receive(0.05) is None


def test_keys_let_in_only_their_holder() -> None:
    hub = ZmqHub("127.0.0.1")
    hub.register(DRAFT)
    public, secret = (key.decode() for key in zmq.curve_keypair())
    true = hub.endpoint
    others = [
        Endpoint(true.reports, true.commands),
        Endpoint(true.reports, true.commands, true.server_key, public, secret),
        Endpoint(true.reports, true.commands, public, true.client_key, true.client_secret),
    ]
    sockets = [raw(endpoint) for endpoint in others]
    for socket in sockets:
        with suppress(zmq.Again):  # it was refused before it could send, and would wait for ever
            socket.send_multipart([routing_id(DRAFT), msgspec.msgpack.encode(Progress("let me in"))], zmq.NOBLOCK)
    assert hub.receive(0.5) == []
    assert hub.num_dropped == 0
    port = ZmqPort(true, DRAFT)
    port.send(Progress("with the key"))
    assert hub.receive(PATIENCE_S) == [(DRAFT, Progress("with the key"))]
    for socket in sockets:
        socket.close()
    port.close()
    hub.close()


def test_keys_are_fresh_and_never_shown() -> None:
    one, two = ZmqHub("127.0.0.1"), ZmqHub("127.0.0.1")
    secret = one.endpoint.client_secret
    assert secret
    assert secret != two.endpoint.client_secret
    assert secret not in repr(one.endpoint) + str(one.endpoint)
    one.close()
    two.close()
    assert Endpoint("r", "c") == msgspec.json.decode(msgspec.json.encode(Endpoint("r", "c")), type=Endpoint)


def test_closing_removes_all_sockets() -> None:
    hub = ZmqHub()
    place = hub.endpoint.reports.removeprefix("ipc://")
    import os

    assert os.path.exists(place)  # noqa: PTH110 - a socket
    hub.close()
    hub.close()
    assert not os.path.exists(place)  # noqa: PTH110
    hub.post(TARGET, Died("too late"))
