"""ZeroMQ without a copy in Python: a push socket each way over TCP, with blocking calls."""

from bench.contenders.base import Layout
from bench.contenders.zmq_ipc import SocketSide
from verification.places import free_port


def connect(layout: Layout) -> tuple[list[SocketSide], SocketSide]:
    there = f"tcp://{layout.single_address}:{free_port()}"
    back = f"tcp://{layout.peer_address}:{free_port()}" if layout.both_ways else None
    senders = [SocketSide(there, back, layout.depth) for _ in range(layout.peers)]
    return senders, SocketSide(back, there, layout.depth)
