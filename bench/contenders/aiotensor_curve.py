"""aiotensor over `tcp://` on the loopback with keys: CURVE encrypts all bytes, as between machines."""

import zmq

from bench.contenders.aiotensor_link import Keys, LinkSide, arena_bytes
from bench.contenders.base import Layout
from verification.places import free_port


def connect(layout: Layout) -> tuple[list[LinkSide], LinkSide]:
    there, limits = f"tcp://127.0.0.1:{free_port()}", (layout.depth, arena_bytes(layout))
    back = f"tcp://127.0.0.1:{free_port()}" if layout.both_ways else None
    keys = Keys(*zmq.curve_keypair())
    senders = [LinkSide(there, back, *limits, keys) for _ in range(layout.peers)]
    return senders, LinkSide(back, there, *limits, keys)
