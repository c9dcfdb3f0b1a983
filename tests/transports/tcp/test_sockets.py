"""A ZeroMQ socket on the event loop, and messages with too many parts."""

import zmq

from aiotensor.transports.tcp.sockets import LoopSocket, ZmqContext
from verification.waiting import until


class Listening(LoopSocket):
    """A socket that collects its messages."""

    def __init__(self, context: ZmqContext) -> None:
        super().__init__(context, zmq.ROUTER, 0, {})
        self.messages: list[bytes] = []
        self._socket.bind("tcp://127.0.0.1:*")
        self.address = bytes(self._socket.get(zmq.LAST_ENDPOINT)).decode().rstrip("\0")

    def message_arrived(self, parts: list[zmq.Frame]) -> None:
        self.messages.append(parts[1].bytes)

    def event(self, kind: int, value: int) -> None: ...

    def ended(self, identity: bytes) -> None: ...


async def test_parts_beyond_the_first_are_not_taken_for_messages() -> None:
    with ZmqContext() as context, context.socket(zmq.DEALER) as peer:
        listening = Listening(context)
        peer.connect(listening.address)
        for count in (0, 1, 2, 7, 8, 0):
            peer.send_multipart([b"first", *[b"too many"] * count])
        await until(lambda: len(listening.messages) == 6)
        listening.shut()
    assert set(listening.messages) == {b"first"}
