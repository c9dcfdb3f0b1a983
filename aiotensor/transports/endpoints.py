"""Endpoints: the choice of the transport for an address or a queue.

A new transport needs one module with a connector and a listener, and one branch in `route_to`.
"""

from collections.abc import Callable, Coroutine
from functools import partial
from multiprocessing.queues import Queue
from typing import Any, NamedTuple, TypeAlias

from aiotensor.transports.address import TcpArguments, label_of, socket_path
from aiotensor.transports.base import Acceptor, Connector, ConnectorEvents, Listener
from aiotensor.transports.rendezvous import PlainQueue, QueueConnector, listen_on
from aiotensor.transports.tensor_queue import TensorQueue
from aiotensor.transports.unix import UnixConnector, listen_at

__all__ = ["Endpoint", "Route", "TcpArguments", "TensorQueue", "route_to"]

Endpoint: TypeAlias = str | TensorQueue | PlainQueue

_CONNECTS = TcpArguments()


class Route(NamedTuple):
    """How to connect to an endpoint, and how to listen at it.

    Attributes:
        label: the name of the endpoint in logs and metrics: its address, or ``queue``.
        connector: makes the connecting side, given the object that is notified.
        listen: begins to listen, given an acceptor. Raises `UsageError` if another receiver listens there or
            the address is otherwise in use, and `OSError` if this process cannot listen there.
    """

    label: str
    connector: Callable[[ConnectorEvents], Connector]
    listen: Callable[[Acceptor], Coroutine[Any, Any, Listener]]


def route_to(endpoint: Endpoint, given: TcpArguments = _CONNECTS) -> Route:
    """Validate an endpoint, and return its route, without opening anything.

    Args:
        endpoint: an address, a `TensorQueue` or a `multiprocessing.Queue`.
        given: the arguments for connections between machines.

    Raises:
        TypeError: the endpoint is neither an address nor a queue, or an argument has the wrong type.
        ValueError: no transport serves the address, or an argument does not apply to the endpoint.
    """
    if isinstance(endpoint, str) and endpoint.lower().startswith("tcp:"):
        return _over_tcp(endpoint, given)
    if given.is_given:
        raise ValueError(
            "keys and peer_timeout_s can only be used with tcp:// addresses: at other endpoints the kernel "
            "identifies the user of the peer, and reports its end"
        )
    if isinstance(endpoint, TensorQueue):
        name = endpoint.socket_name
        return Route("queue", partial(UnixConnector, name), partial(listen_at, name))
    if isinstance(endpoint, Queue):
        return Route("queue", partial(QueueConnector, endpoint), partial(listen_on, endpoint))
    if not isinstance(endpoint, str):
        raise TypeError(
            "endpoint must be an address such as 'unix:///run/user/1000/engine.sock', an "
            f"aiotensor.TensorQueue or a multiprocessing.Queue, got {type(endpoint).__name__!r}"
        )
    path = socket_path(endpoint)
    return Route(label_of(endpoint), partial(UnixConnector, path), partial(listen_at, path))


def _over_tcp(endpoint: str, given: TcpArguments) -> Route:
    # Imported here, so that tensors on one machine do not need ZeroMQ.
    from aiotensor.transports.tcp.connector import TcpConnector
    from aiotensor.transports.tcp.listener import listen_at as listen_over_tcp
    from aiotensor.transports.tcp.options import options_of

    options = options_of(endpoint, given)
    return Route(label_of(endpoint), partial(TcpConnector, options), partial(listen_over_tcp, options))
