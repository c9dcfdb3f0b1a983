"""Messages with tensors inside, between processes, over ZeroMQ.

    client                                                server
    await client.request(Video(frames=frames)) ────────▶  async for request in server:
                                               ◀────────      await request.reply(Embedding(vector=vector))

The message itself goes over ZeroMQ. Its tensors go by the client's `TensorSender` to the server's
`TensorReceiver`, as one message with one permit, and stand in their places again when the server has it;
without a sender they travel in the message. The answer comes back in the same way.

From the top down: `client` and `server` are what you call, `request` is what the server hands out;
`connection` and `clients` keep the protocol, on either side; `parcels` takes messages apart and puts them
together; `endpoint` and `options` say who may connect; `sockets` has ZeroMQ on the event loop.
"""

from aiotensor.channel.client import MessageClient
from aiotensor.channel.request import Request
from aiotensor.channel.server import MessageServer
from aiotensor.types import ClientStatistics, ServerStatistics

__all__ = ["ClientStatistics", "MessageClient", "MessageServer", "Request", "ServerStatistics"]
