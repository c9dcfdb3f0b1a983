"""The API for threads without an event loop, such as an engine that runs torch on its main thread.

    with MessageServer(address, Video) as server:
        for request in server:
            with request:
                request.answer(Embedding(model(request.message.frames)))

Names, arguments and errors are those of `aiotensor`. Use ``with`` and ``for`` in place of ``async with`` and
``async for``. In place of ``asyncio.timeout``, methods that may wait have an argument `timeout` in seconds,
None for no limit. After this time, they raise `TimeoutError` and release their resources, as a cancelled call
does. `put` and `get` of queues raise `WouldBlockError` instead, as the asynchronous methods do. An exception
that a signal handler raises ends a call in the same way.

All objects of a process share one event loop in a separate thread. The thread runs while any of them is open,
and does not keep the interpreter from exiting.
"""

from aiotensor.blocking.broadcast import Publisher, Subscriber
from aiotensor.blocking.messages import MessageClient, MessageServer, Permit, Request
from aiotensor.blocking.queues import MessageQueue, QueueConsumer, QueueProducer
from aiotensor.blocking.ranks import RankPipe
from aiotensor.blocking.tensors import OpenMessage, TensorReceiver, TensorSender

__all__ = [
    "MessageClient",
    "MessageQueue",
    "MessageServer",
    "OpenMessage",
    "Permit",
    "Publisher",
    "QueueConsumer",
    "QueueProducer",
    "RankPipe",
    "Request",
    "Subscriber",
    "TensorReceiver",
    "TensorSender",
]
