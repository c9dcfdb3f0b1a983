"""Roads between processes. A new link is one new file and one branch in each function below."""

from typing import TypeAlias

from aiotensor.links.base import Listener, SenderLink
from aiotensor.links.queue import QueueListener, QueueSenderLink, TensorQueue

__all__ = ["Endpoint", "connect", "listen"]

Endpoint: TypeAlias = TensorQueue


def connect(endpoint: Endpoint, sender: str) -> SenderLink:
    """Make a sender's end of the link that an endpoint asks for, not opened yet.

    Raises:
        TypeError: it is no endpoint.
        ValueError: it is an address that no link serves.
    """
    if isinstance(endpoint, TensorQueue):
        return QueueSenderLink(endpoint, sender)
    raise _refusal(endpoint)


def listen(endpoint: Endpoint) -> Listener:
    """Make a receiver's end of the link that an endpoint asks for, not opened yet.

    Raises:
        TypeError: it is no endpoint.
        ValueError: it is an address that no link serves.
    """
    if isinstance(endpoint, TensorQueue):
        return QueueListener(endpoint)
    raise _refusal(endpoint)


def _refusal(endpoint: object) -> Exception:
    if isinstance(endpoint, str):
        return ValueError(f"no link serves the address {endpoint!r}: pass an aiotensor.TensorQueue()")
    return TypeError(f"an endpoint is an aiotensor.TensorQueue, got {type(endpoint).__name__!r}")
