"""Every object reports when its peers connect and disconnect, and why."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from aiotensor import (
    ClosedError,
    PeerEvent,
    PeerLostError,
    RefusedError,
    TensorReceiver,
    TensorSender,
    UsageError,
)
from aiotensor.broadcast import Publisher, Subscriber
from aiotensor.channel import MessageClient, MessageServer
from aiotensor.runtime.peer_events import LoopObjectWithPeers
from tests.broadcast import workers
from tests.channel import peers as channel_peers
from tests.channel.parties import Answer, Place, Question, place
from tests.pairs import comes_back, endpoint
from verification.processes import peers
from verification.promptly import promptly

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


async def disconnected(events: AsyncIterator[PeerEvent]) -> PeerEvent:
    """Return the next event, which must be a disconnect."""
    event = await anext(events)
    assert event.kind == "disconnected", event
    return event


@pytest.mark.usefixtures("link")
async def test_a_receiver_reports_that_a_sender_connects_and_closes() -> None:
    with endpoint() as here:
        async with TensorReceiver(here) as receiver:
            events = receiver.peer_events()
            async with TensorSender(here) as sender:
                connected = await anext(events)
                assert (connected.kind, connected.peer) == ("connected", sender.id)
            closed = await disconnected(events)
            assert (closed.peer, closed.pid, closed.error) == (sender.id, connected.pid, None)


@pytest.mark.usefixtures("link")
async def test_a_receiver_reports_that_a_sender_is_killed() -> None:
    with endpoint() as here:
        async with peers.peers(here, 1) as [child], TensorReceiver(here) as receiver:
            events = receiver.peer_events()
            name = await child.call(peers.open_sender)
            assert await anext(events) == PeerEvent("connected", name, child.pid)
            with promptly():
                child.kill()
                lost = await disconnected(events)
            assert (lost.peer, lost.pid) == (name, child.pid)
            assert isinstance(lost.error, PeerLostError)


@pytest.mark.usefixtures("link")
async def test_a_sender_reports_that_a_receiver_is_killed_and_that_another_replaces_it() -> None:
    with endpoint() as here:
        async with peers.peers(here, 1) as [child], TensorSender(here, 2, 1 << 20) as sender:
            events = sender.peer_events()
            await child.call(peers.open_receiver)
            connected = await anext(events)
            assert (connected.kind, connected.pid) == ("connected", child.pid)
            assert connected.peer == sender.receiver_id
            with promptly():
                child.kill()
                lost = await disconnected(events)
            assert (lost.peer, lost.pid) == (connected.peer, child.pid)
            assert isinstance(lost.error, PeerLostError)
            await child.ended()  # its listening socket may outlive its connections
            if comes_back():
                async with TensorReceiver(here) as receiver:
                    next_one = await anext(events)
                    assert (next_one.kind, next_one.peer) == ("connected", receiver.id)


@pytest.mark.usefixtures("link")
async def test_a_sender_reports_that_a_receiver_closes() -> None:
    with endpoint() as here:
        async with TensorReceiver(here) as receiver, TensorSender(here) as sender:
            events = sender.peer_events()
            assert (await anext(events)).kind == "connected"
            await receiver.aclose()
            closed = await disconnected(events)
            assert (closed.peer, closed.error) == (receiver.id, None)


async def test_a_refused_sender_causes_no_event(address: str) -> None:
    async with TensorReceiver(address, max_senders=1) as receiver, TensorSender(address) as first:
        await first.ready()
        async with TensorSender(address) as second:
            events, theirs = second.peer_events(), receiver.peer_events()
            with pytest.raises(RefusedError):
                await second.ready()
            await first.aclose()
            await second.ready()
            assert (await anext(events)).kind == "connected"
            seen = [await anext(theirs) for _ in range(3)]
            assert [(event.kind, event.peer) for event in seen] == [
                ("connected", first.id),
                ("disconnected", first.id),
                ("connected", second.id),
            ]


async def test_a_server_and_a_client_report_each_other() -> None:
    with place() as here:
        client: MessageClient[Answer] = MessageClient(here.messages, reply_type=Answer)
        async with MessageServer(here.messages, Question) as server:
            of_server = server.peer_events()
            async with client:
                of_client = client.peer_events()
                clients, servers = await anext(of_server), await anext(of_client)
                assert (clients.kind, servers.kind) == ("connected", "connected")
                assert servers.peer == here.messages
                await server.aclose()
                closed = await disconnected(of_client)
                assert (closed.peer, closed.pid, closed.error) == (here.messages, servers.pid, None)
        assert await anext(of_server, None) is None


async def test_a_server_reports_that_a_client_closes_or_is_killed() -> None:
    with place() as here:
        async with channel_peers.process(here) as child, channel_peers.listening(here) as (server, _):
            events = server.peer_events()
            await child.call(channel_peers.open_client, here)
            connected = await anext(events)
            assert connected.pid == child.pid
            with promptly():
                child.kill()
                lost = await disconnected(events)
            assert (lost.peer, lost.pid) == (connected.peer, child.pid)
            assert isinstance(lost.error, PeerLostError)
            async with MessageClient(here.messages, reply_type=Answer):
                again = await anext(events)
                assert again.peer != connected.peer
            closed = await disconnected(events)
            assert closed.peer == again.peer
            assert isinstance(closed.error, PeerLostError)


async def test_a_client_reports_that_a_server_is_killed_and_that_another_replaces_it() -> None:
    with place() as here:
        async with (
            channel_peers.process(here) as child,
            MessageClient(here.messages, reply_type=Answer) as client,
        ):
            events = client.peer_events()
            await child.call(channel_peers.open_server, here)
            assert await anext(events) == PeerEvent("connected", here.messages, child.pid)
            with promptly():
                child.kill()
                lost = await disconnected(events)
            assert (lost.peer, lost.pid) == (here.messages, child.pid)
            assert isinstance(lost.error, PeerLostError)
            await child.ended()  # its listening sockets may outlive its connections
            async with channel_peers.listening(here):
                assert (await anext(events)).kind == "connected"


@pytest.mark.usefixtures("link")
async def test_a_publisher_and_a_subscriber_report_each_other() -> None:
    with endpoint() as here:
        async with Publisher(here) as publisher:
            of_publisher = publisher.peer_events()
            async with Subscriber[Any](here) as subscriber:
                of_subscriber = subscriber.peer_events()
                seen, found = await anext(of_publisher), await anext(of_subscriber)
                assert (seen.kind, seen.peer) == ("connected", subscriber.id)
                assert (found.kind, found.peer) == ("connected", publisher.id)
            closed = await disconnected(of_publisher)
            assert (closed.peer, closed.error) == (subscriber.id, None)
            async with Subscriber[Any](here) as subscriber:
                of_subscriber = subscriber.peer_events()
                assert (await anext(of_subscriber)).kind == "connected"
                await publisher.aclose()
                closed = await disconnected(of_subscriber)
                assert (closed.peer, closed.error) == (publisher.id, None)


@pytest.mark.usefixtures("link")
async def test_a_publisher_reports_that_a_subscriber_is_killed() -> None:
    with endpoint() as here:
        async with peers.peers(here, 1) as [child], Publisher(here) as publisher:
            events = publisher.peer_events()
            name = await child.call(workers.subscribe)
            assert await anext(events) == PeerEvent("connected", name, child.pid)
            with promptly():
                child.kill()
                lost = await disconnected(events)
            assert (lost.peer, lost.pid) == (name, child.pid)
            assert isinstance(lost.error, PeerLostError)


async def test_a_disconnected_slow_subscriber_is_reported_with_the_reason(address: str) -> None:
    async with (
        Publisher(address, max_behind=1, slow="disconnect") as publisher,
        Subscriber[Any](address) as subscriber,
    ):
        await publisher.wait_for_subscribers(1)
        events, theirs = publisher.peer_events(), subscriber.peer_events()
        assert (await anext(events)).kind == (await anext(theirs)).kind == "connected"
        for number in range(2):
            await publisher.publish(number)
        lost = await disconnected(events)
        assert isinstance(lost.error, PeerLostError)
        assert "1 publications behind" in str(lost.error)
        assert isinstance((await disconnected(theirs)).error, PeerLostError)


_MAKERS: dict[str, Callable[[Place], AbstractAsyncContextManager[LoopObjectWithPeers]]] = {
    "sender": lambda here: TensorSender(here.tensors),
    "receiver": lambda here: TensorReceiver(here.tensors),
    "client": lambda here: MessageClient(here.messages, reply_type=Answer),
    "server": lambda here: MessageServer(here.messages, Question),
    "publisher": lambda here: Publisher(here.answers),
    "subscriber": lambda here: Subscriber(here.answers),
}


@pytest.mark.parametrize("kind", _MAKERS)
async def test_iterations_end_when_their_object_is_closed(kind: str) -> None:
    with place() as here:
        thing = _MAKERS[kind](here)
        assert isinstance(thing, LoopObjectWithPeers)
        with pytest.raises(UsageError, match="is not open yet"):
            thing.peer_events()
        async with thing:
            waiting = asyncio.create_task(anext(thing.peer_events(), None))
            idle = thing.peer_events()
            await asyncio.sleep(0)
            assert not waiting.done()
        assert await waiting is None
        assert await anext(idle, None) is None
        with pytest.raises(ClosedError):
            thing.peer_events()


async def test_iterating_in_another_thread_raises_usage_error(address: str) -> None:
    async with TensorReceiver(address) as receiver:
        events = receiver.peer_events()

        async def iterate() -> None:
            with pytest.raises(UsageError, match="belongs to another thread"):
                await anext(events)

        await asyncio.to_thread(asyncio.run, iterate())
