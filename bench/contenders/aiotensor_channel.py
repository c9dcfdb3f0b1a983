"""aiotensor's messages with tensors inside: the message over ZeroMQ, its tensors over `unix://`.

For an echo, a second sender and receiver transfer the tensors of answers. A small answer needs none.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiotensor
from aiotensor.channel import MessageClient, MessageServer
from bench.contenders.base import Layout
from bench.messages import REPLY_TYPES, Video
from bench.records import Reply


@dataclass(frozen=True)
class _Place:
    """The addresses of both sides."""

    folder: Path
    reply: Reply

    @property
    def messages(self) -> str:
        return f"ipc://{self.folder}/messages"

    @property
    def there(self) -> str:
        return f"unix://{self.folder}/there.sock"

    @property
    def back(self) -> str | None:
        return f"unix://{self.folder}/back.sock" if self.reply == "echo" else None


@dataclass(frozen=True)
class ClientSide:
    place: _Place

    @asynccontextmanager
    async def open(self) -> AsyncIterator[MessageClient[Any]]:
        async with AsyncExitStack() as stack:
            receiver = None
            if self.place.back is not None:
                receiver = await stack.enter_async_context(aiotensor.TensorReceiver(self.place.back))
            sender = await stack.enter_async_context(aiotensor.TensorSender(self.place.there))
            reply_type: type[Any] = REPLY_TYPES[self.place.reply]
            yield await stack.enter_async_context(
                MessageClient(self.place.messages, sender=sender, receiver=receiver, reply_type=reply_type)
            )


@dataclass(frozen=True)
class ServerSide:
    place: _Place

    @asynccontextmanager
    async def open(self) -> AsyncIterator[MessageServer[Video]]:
        async with AsyncExitStack() as stack:
            receiver = await stack.enter_async_context(aiotensor.TensorReceiver(self.place.there))
            senders = []
            if self.place.back is not None:
                senders.append(await stack.enter_async_context(aiotensor.TensorSender(self.place.back)))
            yield await stack.enter_async_context(
                MessageServer(self.place.messages, Video, receiver=receiver, sender=senders)
            )


def connect(layout: Layout) -> tuple[list[ClientSide], ServerSide]:
    place = _Place(layout.folder, layout.reply)
    return [ClientSide(place)], ServerSide(place)
