"""The bytes of a tensor over a TCP socket on the loopback, blocking, into memory that was used before."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import torch

from bench.contenders.base import Layout
from bench.contenders.raw_socket import SocketPort


class TcpPort(SocketPort):
    """A port that receives every tensor of a size in the same memory."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._warm: dict[int, torch.Tensor] = {}

    def memory(self, size: int) -> torch.Tensor:
        if size not in self._warm:
            self._warm = {size: torch.zeros(size, dtype=torch.uint8)}
        return self._warm[size]


@dataclass(frozen=True)
class TcpSide:
    sock: socket.socket

    @asynccontextmanager
    async def open(self) -> AsyncIterator[TcpPort]:
        self.sock.setblocking(True)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield TcpPort(self.sock)


def connect(layout: Layout) -> tuple[list[TcpSide], TcpSide]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    return [TcpSide(near)], TcpSide(far)
