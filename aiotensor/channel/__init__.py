"""Requests and answers between processes: messages that contain tensors, and refer to each other.

    client                                                server
    await client.request(Video(frames=frames)) ────────▶  async for request in server:
                                               ◀────────      await request.answer(Embedding(vector=vector))

A request is a message that asks for an answer, and an answer is a message in the other direction that names
it. Their tensors, and a long body, are placed in shared memory, as those of publications are.

``client`` and ``server`` contain the two roles, and ``cancelling`` the cancellation of the tasks that answer.
"""

from aiotensor.channel.client import MessageClient, Permit
from aiotensor.channel.server import MessageServer, Request
from aiotensor.types import ClientStatistics, ServerStatistics

__all__ = ["ClientStatistics", "MessageClient", "MessageServer", "Permit", "Request", "ServerStatistics"]
