"""Move torch tensors between processes, with asyncio and backpressure."""

import logging
from importlib import import_module
from typing import TYPE_CHECKING

from aiotensor.errors import (
    AccessDeniedError,
    AioTensorError,
    AlreadyTakenError,
    ClosedError,
    DiscardedError,
    PeerLostError,
    ProtocolError,
    RefusedError,
    RemoteError,
    TooLargeError,
    UnavailableError,
    UnsupportedTensorError,
    UsageError,
    WouldBlockError,
)
from aiotensor.transports.endpoints import TensorQueue
from aiotensor.types import (
    Delivery,
    Holder,
    ReceiverStatistics,
    SenderStatistics,
    TensorHandle,
    Usage,
    Waits,
)

__version__ = "1.0.0"

__all__ = [
    "AccessDeniedError",
    "AioTensorError",
    "AlreadyTakenError",
    "ClosedError",
    "Delivery",
    "DiscardedError",
    "Holder",
    "MessageClient",
    "MessageQueue",
    "MessageServer",
    "OpenMessage",
    "PeerLostError",
    "Permit",
    "ProtocolError",
    "Publisher",
    "RankPipe",
    "ReceiverStatistics",
    "RefusedError",
    "RemoteError",
    "Request",
    "SenderStatistics",
    "Subscriber",
    "TensorHandle",
    "TensorQueue",
    "TensorReceiver",
    "TensorSender",
    "TooLargeError",
    "UnavailableError",
    "UnsupportedTensorError",
    "Usage",
    "UsageError",
    "Waits",
    "WouldBlockError",
    "__version__",
]

# Without this handler, Python prints warnings to standard error unless the application configures logging.
logging.getLogger("aiotensor").addHandler(logging.NullHandler())

if TYPE_CHECKING:
    from aiotensor.broadcast import Publisher, Subscriber
    from aiotensor.channel import MessageClient, MessageServer, Permit, Request
    from aiotensor.queues import MessageQueue
    from aiotensor.ranks import RankPipe
    from aiotensor.receiver import TensorReceiver
    from aiotensor.sender import OpenMessage, TensorSender
else:
    # Imported on first use, because they import torch, which takes seconds. The command does not need it.
    _NEED_TORCH = {
        "MessageClient": "aiotensor.channel",
        "MessageQueue": "aiotensor.queues",
        "MessageServer": "aiotensor.channel",
        "OpenMessage": "aiotensor.sender",
        "Permit": "aiotensor.channel",
        "Publisher": "aiotensor.broadcast",
        "RankPipe": "aiotensor.ranks",
        "Request": "aiotensor.channel",
        "Subscriber": "aiotensor.broadcast",
        "TensorReceiver": "aiotensor.receiver",
        "TensorSender": "aiotensor.sender",
    }

    def __getattr__(name: str) -> object:
        if name not in _NEED_TORCH:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_NEED_TORCH[name]), name)
        return value

    def __dir__() -> list[str]:
        return sorted(globals().keys() | _NEED_TORCH.keys())
