"""The bytes of a tensor over a Unix record socket, in callbacks of the event loop: the limit for asyncio."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import torch

from bench.contenders.base import Layout
from bench.contenders.in_callbacks import far, near

__all__ = ["connect", "far", "near"]

_BUFFER = 1 << 20


class RecordPort:
    def __init__(self, sock: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock

    def listen(self, arrived: Callable[[], None]) -> None:
        self._loop.add_reader(self._sock, arrived)

    def stop(self) -> None:
        self._loop.remove_reader(self._sock)

    def send(self, tensor: torch.Tensor) -> None:
        self._sock.send(tensor.numpy().data)

    def receive(self, size: int) -> torch.Tensor:
        tensor = torch.empty(size, dtype=torch.uint8)
        if self._sock.recv_into(tensor.numpy().data) != size:
            raise ConnectionError("the other side closed the socket")
        return tensor


@dataclass(frozen=True)
class SocketSide:
    sock: socket.socket

    @asynccontextmanager
    async def open(self) -> AsyncIterator[RecordPort]:
        self.sock.setblocking(False)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        yield RecordPort(self.sock)


def connect(layout: Layout) -> tuple[list[SocketSide], SocketSide]:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return [SocketSide(near)], SocketSide(far)
