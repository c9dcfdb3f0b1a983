"""Fixtures of the tests of blocking calls; each test must leave nothing behind, and cause no warnings."""

import gc
import threading
from collections.abc import Iterator

import pytest
from zmq.utils.garbage import GarbageCollectorThread

from tests.blocking.fork_server import ForkServer
from tests.blocking.waiting import Place, until
from tests.channel import parties
from verification import loops
from verification.descriptors import our_descriptors

_ENDING_S = 10.0  # more than any thread needs to end


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Fail a test that leaves a thread or a descriptor behind, or that makes asyncio complain."""
    threads, descriptors = set(threading.enumerate()), our_descriptors()
    with loops.complaints() as complaints:
        yield
    left = {
        thread
        for thread in threading.enumerate()
        if thread not in threads and not isinstance(thread, GarbageCollectorThread)  # which is pyzmq's
    }
    # The loop's thread ends before the last object is closed; the others may take a moment.
    assert not [thread for thread in left if thread.name == "aiotensor-blocking"]
    for thread in left:
        thread.join(_ENDING_S)
    assert not [thread for thread in left if thread.is_alive()]
    gc.collect()
    until(lambda: our_descriptors().items() <= descriptors.items())
    assert not complaints, "\n".join(complaints)


@pytest.fixture
def place() -> Iterator[Place]:
    """Return the addresses for messages and tensors."""
    with parties.place() as here:
        yield Place(here, f"{here}-tensors")


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Start the process that starts programs."""
    with ForkServer() as fork_server:
        yield fork_server
