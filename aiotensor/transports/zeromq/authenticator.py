"""The authentication of connecting peers by their public keys (ZAP, https://rfc.zeromq.org/spec/27/).

This uses a plain socket rather than `zmq.auth.asyncio`, which stops watching its descriptor only after it has
closed it. By then the descriptor may be that of the next listener, whose peers would get no answer.
"""

import asyncio
from collections.abc import Collection

import zmq
from zmq.utils import z85

from aiotensor.transports.zeromq.context import ZmqContext

__all__ = ["Authenticator"]

_ADDRESS = "inproc://zeromq.zap.01"  # where ZeroMQ sends its requests
_VERSION = b"1.0"
_CURVE = b"CURVE"


class Authenticator:
    """Accept only peers with certain public keys; belongs to the running loop.

    Args:
        context: the context of the sockets to which these peers connect.
        allowed: the public keys.

    Raises:
        zmq.ZMQError: the process has no descriptors left.
    """

    def __init__(self, context: ZmqContext, allowed: Collection[bytes]) -> None:
        self._allowed = allowed
        self._loop = asyncio.get_running_loop()
        self._socket = context.socket(zmq.REP)
        try:
            self._socket.linger = 0
            self._socket.bind(_ADDRESS)
            self._descriptor = int(self._socket.get(zmq.FD))
            self._loop.add_reader(self._descriptor, self._answer_all)
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        """Answer no more requests; ZeroMQ then refuses all peers."""
        self._loop.remove_reader(self._descriptor)
        self._socket.close()

    def _answer_all(self) -> None:
        """Answer all requests: the descriptor becomes readable only once for them."""
        while int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            self._socket.send_multipart(self._answer(self._socket.recv_multipart()), zmq.NOBLOCK)

    def _answer(self, question: list[bytes]) -> list[bytes]:
        _, number, _, _, _, mechanism, *credentials = question
        key = z85.encode(credentials[0]) if mechanism == _CURVE else b""
        status, text, user = (b"200", b"OK", key) if key in self._allowed else (b"400", b"unknown key", b"")
        return [_VERSION, number, status, text, user, b""]
