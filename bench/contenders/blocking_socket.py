"""The bytes of a tensor over a stream socket, blocking: the cost of the kernel alone.

No queue, no pickle, no shared memory. At small sizes no contender that wakes another process can be much
faster. At large sizes it copies twice through the kernel, and is no lower bound. Over TCP, every tensor of a
size is received into the same, warm memory.
"""

import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Literal

import torch

from bench.contenders.base import Layout, Meet, Port, Sides
from verification.places import free_port

_LENGTH = struct.Struct("=Q")


class Stream:
    """One end of a connection, over `sock`."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    async def send(self, tensor: torch.Tensor) -> None:
        payload = tensor.numpy().data
        # One call for a small tensor; a second call sends the rest of a large one.
        sent = self.sock.sendmsg([_LENGTH.pack(len(payload)), payload]) - _LENGTH.size
        self.sock.sendall(payload[sent:])

    async def receive(self) -> torch.Tensor:
        header = self.sock.recv(_LENGTH.size, socket.MSG_WAITALL)
        if len(header) < _LENGTH.size:
            raise ConnectionError("the other side closed the socket")
        tensor = self.memory(_LENGTH.unpack(header)[0])
        if self.sock.recv_into(tensor.numpy().data, 0, socket.MSG_WAITALL) < len(tensor):
            raise ConnectionError("the other side closed the socket in the middle of a tensor")
        return tensor

    def memory(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)


class TcpStream(Stream):
    def __init__(self, address: tuple[str, int], *, listens: bool) -> None:
        super().__init__(socket.create_server(address) if listens else socket.socket())
        self._address = address
        self._listens = listens
        self._warm: dict[int, torch.Tensor] = {}

    async def connect(self, meet: Meet) -> None:
        if self._listens:
            with self.sock as listening:
                self.sock, _ = listening.accept()
        else:
            self.sock.connect(self._address)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def memory(self, size: int) -> torch.Tensor:
        if size not in self._warm:
            self._warm = {size: torch.zeros(size, dtype=torch.uint8)}
        return self._warm[size]


@asynccontextmanager
async def over_unix(sock: socket.socket) -> AsyncIterator[Port]:
    sock.setblocking(True)
    with sock:
        stream = Stream(sock)
        yield Port(stream.send, stream.receive)


@asynccontextmanager
async def over_tcp(address: tuple[str, int], *, listens: bool) -> AsyncIterator[Port]:
    stream = TcpStream(address, listens=listens)
    try:
        yield Port(stream.send, stream.receive, connect=stream.connect)
    finally:
        stream.sock.close()


def connect(layout: Layout, over: Literal["unix", "tcp"] = "unix") -> Sides[Port]:
    if over == "tcp":
        address = layout.single_address, free_port()
        return [partial(over_tcp, address, listens=False)], partial(over_tcp, address, listens=True)
    near, far = socket.socketpair()
    return [partial(over_unix, near)], partial(over_unix, far)
