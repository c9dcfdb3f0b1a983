"""aiotensor's requests: messages with tensors inside, over `unix://`."""

from functools import partial
from typing import Any

from aiotensor.channel import MessageClient, MessageServer
from bench.contenders.base import Layout, Sides
from bench.messages import Message


def connect(layout: Layout) -> Sides[Any]:
    address = f"unix://{layout.folder}/engine.sock"
    return [partial(MessageClient, address, Message)], partial(MessageServer, address, Message)
