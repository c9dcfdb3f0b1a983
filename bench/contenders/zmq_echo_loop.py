"""The bytes of a tensor over a bare ZeroMQ socket and back, in callbacks of the event loop.

ZeroMQ's descriptor only reports that something has changed, and reports it once. So the callback reads until
nothing is left. Sending may consume such a report, and is therefore followed by a read.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import torch
import zmq

from bench.contenders.base import Layout
from bench.contenders.in_callbacks import far, near
from bench.contenders.zmq_echo import address_in, pair, receive, send

__all__ = ["connect", "far", "near"]

# Plain numbers: each operation on an enum takes as long as a call into ZeroMQ.
_NOW = int(zmq.NOBLOCK)
_READABLE = int(zmq.POLLIN)


class LoopEchoPort:
    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self._descriptor = int(socket.get(zmq.FD))
        self._arrived: Callable[[], None] | None = None
        self._looks = False

    def listen(self, arrived: Callable[[], None]) -> None:
        self._arrived = arrived
        self._loop.add_reader(self._descriptor, self._look)
        self._loop.call_soon(self._look)  # for messages that arrived before

    def stop(self) -> None:
        self._arrived = None
        self._loop.remove_reader(self._descriptor)

    def send(self, tensor: torch.Tensor) -> None:
        send(self._socket, tensor, _NOW)
        if not self._looks:
            self._loop.call_soon(self._look)

    def receive(self, size: int) -> torch.Tensor:
        return receive(self._socket, _NOW)

    def _look(self) -> None:
        self._looks = True
        while self._arrived is not None and zmq.zmq_poll([(self._socket, _READABLE)], 0):
            self._arrived()
        self._looks = False


@dataclass(frozen=True)
class EchoSide:
    address: str
    binds: bool

    @asynccontextmanager
    async def open(self) -> AsyncIterator[LoopEchoPort]:
        with pair(self.address, binds=self.binds) as socket:
            yield LoopEchoPort(socket)


def connect(layout: Layout) -> tuple[list[EchoSide], EchoSide]:
    address = address_in(layout)
    return [EchoSide(address, binds=False)], EchoSide(address, binds=True)
