"""Threads iterate over the connects and disconnects of peers."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aiotensor import PeerEvent, PeerLostError
from aiotensor.blocking import (
    MessageClient,
    MessageServer,
    Publisher,
    Subscriber,
    TensorReceiver,
    TensorSender,
)
from aiotensor.blocking.portal import BlockingObjectWithPeers
from tests.blocking.others import Other
from tests.channel.parties import Answer, Place, Question

Pair = tuple[BlockingObjectWithPeers[Any, Any], BlockingObjectWithPeers[Any, Any]]

_PAIRS: dict[str, Callable[[Place], Pair]] = {
    "tensors": lambda here: (TensorReceiver(here.tensors), TensorSender(here.tensors)),
    "messages": lambda here: (
        MessageServer(here.messages, Question),
        MessageClient(here.messages, reply_type=Answer),
    ),
    "broadcast": lambda here: (Publisher(here.tensors), Subscriber(here.tensors)),
}


def _kinds(events: Iterator[PeerEvent]) -> list[str]:
    return [event.kind for event in events]


@pytest.mark.parametrize("kind", _PAIRS)
def test_both_ends_iterate_until_they_are_closed(kind: str, place: Place) -> None:
    near, far = _PAIRS[kind](place)
    with near:
        of_near = near.peer_events()
        with far:
            of_far = far.peer_events()
            assert next(of_near).kind == "connected"
            assert next(of_far).kind == "connected"
            assert next(near.peer_events()).kind == "connected"
        assert _kinds(of_far) == []
        assert next(of_near).kind == "disconnected"
    assert _kinds(of_near) == []


def test_a_thread_is_notified_that_a_sender_is_killed(place: Place, stranger: Other) -> None:
    with TensorReceiver(place.tensors) as receiver:
        events = receiver.peer_events()
        name = stranger.call("open_sender")
        assert next(events) == PeerEvent("connected", name, stranger.pid)
        stranger.kill()
        lost = next(events)
        assert (lost.kind, lost.peer, lost.pid) == ("disconnected", name, stranger.pid)
        assert isinstance(lost.error, PeerLostError)
