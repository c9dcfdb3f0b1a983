"""Move torch tensors between processes, with asyncio and backpressure."""

import logging

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
    UnsupportedTensorError,
    UsageError,
    WouldBlockError,
)
from aiotensor.receiver import TensorReceiver
from aiotensor.sender import OpenMessage, TensorSender
from aiotensor.transports.tensor_queue import TensorQueue
from aiotensor.types import Delivery, Holder, ReceiverStatistics, SenderStatistics, TensorHandle, Usage, Waits

__all__ = [
    "AccessDeniedError",
    "AioTensorError",
    "AlreadyTakenError",
    "ClosedError",
    "Delivery",
    "DiscardedError",
    "Holder",
    "OpenMessage",
    "PeerLostError",
    "ProtocolError",
    "ReceiverStatistics",
    "RefusedError",
    "RemoteError",
    "SenderStatistics",
    "TensorHandle",
    "TensorQueue",
    "TensorReceiver",
    "TensorSender",
    "TooLargeError",
    "UnsupportedTensorError",
    "Usage",
    "UsageError",
    "Waits",
    "WouldBlockError",
]

# Without this handler, Python prints warnings to standard error unless the application configures logging.
logging.getLogger("aiotensor").addHandler(logging.NullHandler())
