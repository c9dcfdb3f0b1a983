"""A rogue that listens for another machine: a plain ZeroMQ socket, on which it can send any messages."""

from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from aiotensor.protocol.network import OPENING
from verification.fuzz.hearing import Inbox
from verification.fuzz.rogues import read_message, send_message
from verification.fuzz.steps import Conversation

__all__ = ["PortListener", "waiting_at_port"]

_LINGER_MS = 1000
_MOMENT_S = 0.02  # for a record that may never arrive
_PATIENCE_S = 20.0  # for a peer that always connects


class PortListener:
    """A socket at a port, for one peer.

    Args:
        sock: the socket.
        opening: the first message of either side.
    """

    def __init__(self, sock: "zmq.Socket[bytes]", opening: bytes = OPENING) -> None:
        self._sock = sock
        self._opening = opening

    async def answer(self, conversation: Conversation) -> None:
        """Accept one peer, and send it the records of a conversation, with the messages before each."""
        first = await read_message(self._sock, _PATIENCE_S)
        assert first is not None, "no peer has connected"
        peer = first[0]
        opening = conversation.steps[0].opening if conversation.steps else None
        self._sock.send_multipart([peer, self._opening if opening is None else bytes.fromhex(opening)])
        inbox = Inbox()
        for step in conversation.steps:
            while inbox.count < step.after and (said := await read_message(self._sock, _MOMENT_S)):
                if said[0] == peer:  # and not its next attempt to connect
                    inbox.add(said[1])
            for message in step.messages:
                if not await send_message(self._sock, [peer, inbox.filled_in(message)], lambda: True):
                    return


@contextmanager
def waiting_at_port(address: str, opening: bytes = OPENING) -> Iterator[PortListener]:
    """Listen at the address of a receiver or publisher; its port is free again at the end."""
    context = zmq.Context()
    try:
        with context.socket(zmq.ROUTER) as sock:
            sock.linger = _LINGER_MS
            sock.router_mandatory = True
            sock.bind(address)
            yield PortListener(sock, opening)
    finally:
        context.term()
