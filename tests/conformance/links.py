"""The links that the suite runs over. A new link is one row of `LINKS`.

A row says how to make a place where a sender and a receiver meet. Everything else is made from that, in the
same way for all: pairs of processes, and clogged ones (`pairs.py`).
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

from aiotensor import TensorQueue
from aiotensor.transports.endpoints import Endpoint

__all__ = ["LINKS", "Link", "Place"]


class Place(NamedTuple):
    """Where a sender and a receiver meet.

    Attributes:
        endpoint: what both are given; it reaches another process while that is spawned.
        names: lists what it has in the file system now.
    """

    endpoint: Endpoint
    names: Callable[[], list[str]]


class Link(NamedTuple):
    """A link, as the suite sees it.

    Attributes:
        place: makes a place of its own for one test, and takes away what a killed receiver left there.
        comes_back: a sender that lost its receiver goes on with the next one at the same place.
    """

    place: Callable[[], AbstractContextManager[Place]]
    comes_back: bool


@contextmanager
def _on_a_queue() -> Iterator[Place]:
    queue = TensorQueue()
    try:
        yield Place(queue, list)
    finally:
        queue.close()


@contextmanager
def _at_an_address() -> Iterator[Place]:
    folder = tempfile.mkdtemp(prefix="aiotensor-")  # the folders of pytest are too long for a socket
    try:
        yield Place(f"unix://{folder}/s", lambda: os.listdir(folder))
    finally:
        shutil.rmtree(folder)


LINKS = {
    "queue": Link(_on_a_queue, comes_back=False),
    "unix": Link(_at_an_address, comes_back=True),
}
