"""Endpoints of each link, for one test or one run at a time. A new link is one row of `LINKS`."""

import itertools
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

from aiotensor import TensorQueue
from aiotensor.transports.endpoints import Endpoint

# Below the ports that the kernel gives to outgoing connections. Each worker of a test run has its own: a port
# is taken some time after it was found to be free.
_FIRST_PORT, _PORTS = 20000, 1000
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 10
_next_port = itertools.count(secrets.randbelow(_PORTS))


class Place(NamedTuple):
    """An endpoint, and its names in the file system.

    Attributes:
        endpoint: the argument of the sender and of the receiver; a child process inherits it when it is
            started.
        names: lists the files that the endpoint currently has.
    """

    endpoint: Endpoint
    names: Callable[[], list[str]]


class Link(NamedTuple):
    """One kind of endpoint.

    Attributes:
        place: makes an endpoint, and removes it with the files that a killed receiver left.
        is_local: whether both sides share memory.
        connects_at_once: whether connecting to a receiver that listens takes no time.
    """

    place: Callable[[], AbstractContextManager[Place]]
    is_local: bool = True
    connects_at_once: bool = True


@contextmanager
def _on_a_queue() -> Iterator[Place]:
    yield Place(TensorQueue(), list)


@contextmanager
def _at_an_address() -> Iterator[Place]:
    folder = tempfile.mkdtemp(prefix="aiotensor-")  # the folders of pytest are too long for a socket
    try:
        yield Place(f"unix://{folder}/s", lambda: os.listdir(folder))
    finally:
        shutil.rmtree(folder)


@contextmanager
def _at_a_port() -> Iterator[Place]:
    yield Place(f"tcp://127.0.0.1:{free_port()}", list)


def free_port() -> int:
    """Return a free port that no outgoing connection gets."""
    while True:
        port = _FIRST_PORT + _WORKER * _PORTS + next(_next_port) % _PORTS
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


LINKS = {
    "queue": Link(_on_a_queue),
    "tcp": Link(_at_a_port, is_local=False, connects_at_once=False),
    "unix": Link(_at_an_address),
}

LOCAL = [name for name, link in LINKS.items() if link.is_local]

AT_ONCE = [name for name, link in LINKS.items() if link.connects_at_once]


@contextmanager
def endpoint(link: str) -> Iterator[Endpoint]:
    """Create an endpoint, and check that its users have left no files at the end.

    Args:
        link: one of `LINKS`.
    """
    with LINKS[link].place() as place:
        yield place.endpoint
        assert not place.names()
