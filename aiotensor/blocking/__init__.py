"""The same, for threads without an event loop, such as an engine that runs torch on its main thread.

    with TensorReceiver(address) as receiver, MessageServer(messages, Video, receiver=receiver) as server:
        for request in server:
            with request:
                request.reply(Embedding(model(request.message.frames)))

Names, arguments and errors are those of `aiotensor` and `aiotensor.channel`, with ``with`` and ``for`` in
place of ``async with`` and ``async for``, and with ``timeout=`` in seconds where one would write
``asyncio.timeout``: `TimeoutError` then, and what the call had is given back, as when it is cancelled. A
signal ends a call in the same way. The objects of a process share one event loop in a thread of its own; that
is there while one of them is open, and does not keep the interpreter from ending.
"""

from aiotensor.blocking.messages import MessageClient, MessageServer, Request
from aiotensor.blocking.tensors import OpenMessage, TensorReceiver, TensorSender

__all__ = ["MessageClient", "MessageServer", "OpenMessage", "Request", "TensorReceiver", "TensorSender"]
