"""The bytes of a tensor over a TCP socket, blocking, into memory that was used before."""

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass

import torch

from bench.contenders.base import Layout
from bench.contenders.raw_socket import SocketPort
from verification.places import free_port


class TcpPort(SocketPort):
    """A port that receives every tensor of a size in the same memory."""

    def __init__(self, address: tuple[str, int], *, listens: bool) -> None:
        super().__init__(socket.create_server(address) if listens else socket.socket())
        self._address = address
        self._listens = listens
        self._warm: dict[int, torch.Tensor] = {}

    async def connect(self, meet: Callable[[], Awaitable[None]]) -> None:
        if self._listens:
            with self._sock as listening:
                self._sock, _ = listening.accept()
        else:
            self._sock.connect(self._address)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def memory(self, size: int) -> torch.Tensor:
        if size not in self._warm:
            self._warm = {size: torch.zeros(size, dtype=torch.uint8)}
        return self._warm[size]

    def close(self) -> None:
        self._sock.close()


@dataclass(frozen=True)
class TcpSide:
    address: tuple[str, int]
    listens: bool

    @asynccontextmanager
    async def open(self) -> AsyncIterator[TcpPort]:
        with closing(TcpPort(self.address, listens=self.listens)) as port:
            yield port


def connect(layout: Layout) -> tuple[list[TcpSide], TcpSide]:
    address = layout.single_address, free_port()
    return [TcpSide(address, listens=False)], TcpSide(address, listens=True)
