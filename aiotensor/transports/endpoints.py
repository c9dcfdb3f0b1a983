"""Endpoints: an address or a queue, and the transport for it.

A new transport needs one module with a connector and a listener, and one branch in `route_to`.
"""

import os
import secrets
from collections.abc import Callable, Coroutine
from functools import partial
from multiprocessing.queues import Queue
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from aiotensor.transports.address import TcpArguments, label_of, socket_path
from aiotensor.transports.base import Acceptor, Connector, Events, Listener
from aiotensor.transports.unix import UnixConnector, listen_at

if TYPE_CHECKING:
    PlainQueue: TypeAlias = Queue[Any]
else:
    PlainQueue = Queue  # generic at runtime only since Python 3.12

_CONNECTS = TcpArguments()


class TensorQueue:
    """An address without a path, for the processes to which it is passed.

    Create the queue in one process, and pass it to others: as an argument of `multiprocessing` processes that
    are started by ``spawn`` or ``forkserver``, or in any other way that pickles it. Then open one
    `TensorReceiver` or `Publisher` on it, and any number of `TensorSender`s or `Subscriber`s, each in any of
    these processes and in any order. A queue is only a name, so it uses no descriptors and leaves nothing in
    the file system.

    Only processes of this user and in this network namespace can connect; a container has its own by default.
    """

    def __init__(self, name: str | None = None) -> None:
        self._name = name or secrets.token_hex(16)

    def __repr__(self) -> str:
        return f"<TensorQueue {self._name}>"

    @property
    def socket_name(self) -> str:
        """The abstract address of the receiver's socket, which ends with that socket.

        Only the library uses this.
        """
        return f"\0aiotensor-{self._name}"


Endpoint: TypeAlias = str | TensorQueue | PlainQueue


class Route(NamedTuple):
    """How to connect to an endpoint, and how to listen at it.

    Attributes:
        label: the name of the endpoint in logs and metrics: its address, or ``queue``.
        connector: makes the connecting side, given its callbacks.
        listen: begins to listen, given an acceptor. Raises `UsageError` if another receiver listens there or
            the address is otherwise in use, and `OSError` if this process cannot listen there.
    """

    label: str
    connector: Callable[[Events], Connector]
    listen: Callable[[Acceptor], Coroutine[Any, Any, Listener]]


def route_to(endpoint: Endpoint, given: TcpArguments = _CONNECTS) -> Route:
    """Validate an endpoint, and return its route, without opening anything.

    Args:
        endpoint: an address, a `TensorQueue` or a `multiprocessing.Queue`.
        given: the arguments for connections between machines.

    Raises:
        TypeError: the endpoint is neither an address nor a queue, or an argument has the wrong type.
        ValueError: no transport serves the address, the queue is closed, or an argument does not apply to the
            endpoint.
    """
    if isinstance(endpoint, str) and endpoint.lower().startswith("tcp:"):
        return _over_tcp(endpoint, given)
    if given.is_given:
        raise ValueError(
            "keys and peer_timeout_s can only be used with tcp:// addresses: at other endpoints the kernel "
            "identifies the user of the peer, and reports its end"
        )
    if isinstance(endpoint, TensorQueue):
        label, socket_address = "queue", endpoint.socket_name
    elif isinstance(endpoint, Queue):
        label, socket_address = "queue", _name_of(endpoint)
    elif isinstance(endpoint, str):
        label, socket_address = label_of(endpoint), socket_path(endpoint)
    else:
        raise TypeError(
            "endpoint must be an address such as 'unix:///run/user/1000/engine.sock', an "
            f"aiotensor.TensorQueue or a multiprocessing.Queue, got {type(endpoint).__name__!r}"
        )
    return Route(label, partial(UnixConnector, socket_address), partial(listen_at, socket_address))


def _name_of(queue: Any) -> str:
    """Return the abstract address of the socket for a stock queue, through which nothing is sent."""
    if queue._closed:
        raise ValueError("the queue was closed: pass an open one")
    # The processes with the queue share its pipe, whose number is unique on this machine.
    return f"\0aiotensor-pipe-{os.fstat(queue._reader.fileno()).st_ino}"


def _over_tcp(endpoint: str, given: TcpArguments) -> Route:
    # Imported here, so that tensors on one machine do not need ZeroMQ.
    from aiotensor.transports.tcp.connector import TcpConnector
    from aiotensor.transports.tcp.listener import listen_at as listen_over_tcp
    from aiotensor.transports.tcp.sockets import options_of

    options = options_of(endpoint, given)
    return Route(label_of(endpoint), partial(TcpConnector, options), partial(listen_over_tcp, options))
