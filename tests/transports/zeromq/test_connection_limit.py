"""Connections of a server, as ZeroMQ reports them: it may deliver the last message of one after the first of
the next one with the same descriptor.
"""

from aiotensor.transports.zeromq.connections import ConnectionLimit

CLIENT = b"client"
OTHERS = range(100, 200)


def _limit() -> ConnectionLimit:
    return ConnectionLimit(None, {CLIENT})


async def test_a_late_message_of_an_ended_connection_leaves_the_client_its_connection() -> None:
    limit = _limit()
    limit.opened(5)
    assert limit.identify(5, CLIENT) == []
    assert limit.identify(5, b"late") == []
    for descriptor in OTHERS:
        limit.opened(descriptor)
    excess = limit.excess()
    assert excess == list(OTHERS)[: len(excess)] != []  # the oldest of the others, and not the client's
    assert limit.closed(5) == [CLIENT, b"late"]


async def test_a_peer_that_is_no_client_replaces_earlier_ones_with_its_descriptor() -> None:
    limit = _limit()
    limit.opened(5)
    assert limit.identify(5, b"first") == []
    assert limit.identify(5, b"second") == [b"first"]
    assert limit.closed(5) == [b"second"]
    assert limit.identify(5, b"third") is None
