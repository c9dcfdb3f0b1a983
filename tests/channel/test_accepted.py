"""Connections of a server, as ZeroMQ reports them: it may deliver the last message of one after the first of
the next one with the same descriptor.
"""

from aiotensor.channel.accepted import Accepted
from aiotensor.channel.refusals import Refusals

CLIENT = b"client"
OTHERS = range(100, 200)


def _accepted(cut: list[int]) -> Accepted:
    def close(descriptor: int) -> bool:
        cut.append(descriptor)
        return True

    return Accepted(None, {CLIENT}.__contains__, close, Refusals())


async def test_a_late_message_of_an_ended_connection_leaves_the_client_its_connection() -> None:
    cut: list[int] = []
    accepted = _accepted(cut)
    accepted.opened(5)
    assert accepted.identify(5, CLIENT) == []
    assert accepted.identify(5, b"late") == []
    for descriptor in OTHERS:
        accepted.opened(descriptor)
    accepted.make_room()
    assert cut == list(OTHERS)[: len(cut)] != []  # the oldest of the others, and not the client's
    assert accepted.closed(5) == [CLIENT, b"late"]


async def test_a_peer_that_is_no_client_replaces_earlier_ones_with_its_descriptor() -> None:
    accepted = _accepted([])
    accepted.opened(5)
    assert accepted.identify(5, b"first") == []
    assert accepted.identify(5, b"second") == [b"first"]
    assert accepted.closed(5) == [b"second"]
    assert accepted.identify(5, b"third") is None
