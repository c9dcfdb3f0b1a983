"""Processes that flood a server with connections, without a key that it accepts."""

import multiprocessing
import selectors
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Protocol

# The greeting of ZMTP 3.0 with the mechanism NULL, which a server with keys refuses.
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)

# The client's part of the handshake after the greetings, and three messages that the protocol does not have.
_SOCKET_TYPE = b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
_READY = b"\x04" + bytes([6 + len(_SOCKET_TYPE)]) + b"\x05READY" + _SOCKET_TYPE
_NONSENSE = b"\x00\x01x" * 3

_SILENT = 128  # connections of one attacker that says nothing


class _Event(Protocol):
    """An event that an attacker sets when its attack has begun."""

    def set(self) -> None: ...


@contextmanager
def attacked(address: str, attack: str, attackers: int = 2) -> Iterator[None]:
    """Attack a server from several processes while the block runs.

    Args:
        address: the address of the server, at ``tcp://``.
        attack: one of `ATTACKS`.
        attackers: the number of processes.
    """
    spawn = multiprocessing.get_context("spawn")
    begun = [spawn.Event() for _ in range(attackers)]
    processes = [spawn.Process(target=ATTACKS[attack], args=(address, event), daemon=True) for event in begun]
    for process in processes:
        process.start()
    try:
        for event in begun:
            assert event.wait(60)
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
            process.close()


def _is_wanted() -> bool:
    """Return whether the process that began the attack still lives."""
    parent = multiprocessing.parent_process()
    return parent is not None and parent.is_alive()


def _connect(address: str) -> socket.socket:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=1.0)


def _visit(address: str, begun: _Event, first: bytes, second: bytes | None) -> None:
    """Connect, say something, wait for the answer and say the rest unless that is None, and close."""
    while _is_wanted():
        with suppress(OSError), _connect(address) as sock:
            sock.sendall(first)
            if second is not None:
                sock.recv(200)
                sock.sendall(second)
            begun.set()


def _say_nothing(address: str, begun: _Event) -> None:
    """Keep connections open and say nothing; replace each that the server closes."""
    with selectors.DefaultSelector() as selector:
        while _is_wanted():
            while len(selector.get_map()) < _SILENT and _is_wanted():
                with suppress(OSError):
                    selector.register(_connect(address), selectors.EVENT_READ)
            begun.set()
            for key, _ in selector.select(1.0):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                is_open = False
                with suppress(OSError):
                    is_open = bool(sock.recv(100))
                if not is_open:
                    selector.unregister(sock)
                    sock.close()


# "speak" completes the handshake of servers without keys, and then sends messages.
ATTACKS: dict[str, Callable[[str, _Event], None]] = {
    "hang up": partial(_visit, first=_GREETING, second=None),
    "greet": partial(_visit, first=_GREETING, second=b""),
    "say nothing": _say_nothing,
    "speak": partial(_visit, first=_GREETING + _READY, second=_NONSENSE),
}

# The attacks that need no handshake.
WITHOUT_KEYS = ("hang up", "greet", "say nothing")
