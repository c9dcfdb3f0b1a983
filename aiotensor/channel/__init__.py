"""Request and reply between processes over ZeroMQ, with messages that contain tensors.

    client                                                server
    await client.request(Video(frames=frames)) ────────▶  async for request in server:
                                               ◀────────      await request.reply(Embedding(vector=vector))

ZeroMQ carries the message itself. The client's `TensorSender` sends its tensors to the server's
`TensorReceiver`, as one message with one permit, and the server decodes the message with the tensors in their
places. Without a sender, the message contains its tensors. Answers are sent in the same way.

From the top down: ``client``, ``server``, ``request`` and ``permits`` are the public interface.
``outgoing_requests``, ``balancer``, ``remote_server`` and ``server_session`` belong to a client; ``serving``,
``batches``, ``clients``, ``client_session`` and ``incoming_requests`` belong to a server. Both use
``payloads``, which sends the tensors of messages, and ``send_queue``. `aiotensor.protocol.client` and
`aiotensor.protocol.server` contain the rules of the protocol, `aiotensor.codec.payload` encodes and decodes
messages, and `aiotensor.transports.zeromq` contains the sockets.
"""

from aiotensor.channel.client import MessageClient
from aiotensor.channel.permits import Permit
from aiotensor.channel.request import Request
from aiotensor.channel.server import MessageServer
from aiotensor.types import ClientStatistics, ServerStatistics

__all__ = ["ClientStatistics", "MessageClient", "MessageServer", "Permit", "Request", "ServerStatistics"]
