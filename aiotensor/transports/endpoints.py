"""Roads between processes. A new link is one new file and one branch in each function below."""

from typing import TypeAlias

from aiotensor.transports.address import label_of, socket_path
from aiotensor.transports.base import Listener, SenderLink
from aiotensor.transports.queue import QueueListener, QueueSenderLink
from aiotensor.transports.tensor_queue import TensorQueue
from aiotensor.transports.unix import UnixListener, UnixSenderLink

__all__ = ["Endpoint", "TensorQueue", "connect", "listen", "name_of"]

Endpoint: TypeAlias = str | TensorQueue


def connect(endpoint: Endpoint, sender: str) -> SenderLink:
    """Make a sender's end of the link that an endpoint asks for, not opened yet.

    Raises:
        TypeError: it is no endpoint.
        ValueError: it is an address that no link serves.
    """
    if isinstance(endpoint, TensorQueue):
        return QueueSenderLink(endpoint, sender)
    return UnixSenderLink(socket_path(_address(endpoint), "unix"))


def listen(endpoint: Endpoint) -> Listener:
    """Make a receiver's end of the link that an endpoint asks for, not opened yet.

    Raises:
        TypeError: it is no endpoint.
        ValueError: it is an address that no link serves.
    """
    if isinstance(endpoint, TensorQueue):
        return QueueListener(endpoint)
    return UnixListener(socket_path(_address(endpoint), "unix"))


def name_of(endpoint: Endpoint) -> str:
    """Return the name of an endpoint in metrics: its address, or ``queue``."""
    return label_of(endpoint) if isinstance(endpoint, str) else "queue"


def _address(endpoint: object) -> str:
    if not isinstance(endpoint, str):
        raise TypeError(
            "an endpoint is an address such as 'unix:///run/user/1000/engine.sock' or an "
            f"aiotensor.TensorQueue, got {type(endpoint).__name__!r}"
        )
    return endpoint
