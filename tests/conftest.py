"""Fixtures for all tests: both event loops, and checks that nothing is left behind."""

import asyncio
import gc
import os
import random
import signal
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import hypothesis
import pytest
import torch

from tests import selection
from tests.pairs import Links
from verification.descriptors import our_descriptors
from verification.networks import Hosts, NoNamespacesError, two_hosts
from verification.places import LINKS
from verification.processes import watch

# A loaded machine must not make a test fail, so examples have no deadline. `make test` has fixed examples.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=not selection.COMPLETE)
hypothesis.settings.load_profile("tests")


def pytest_collection_finish() -> None:
    """Reduce the overhead of torch's threads and of the garbage collector in tests."""
    # torch's threads spin while they wait: on a busy machine, a comparison takes a hundred times as long.
    torch.set_num_threads(1)
    # Later garbage collections skip the imported modules.
    gc.collect()
    gc.freeze()


def pytest_asyncio_loop_factories(
    item: pytest.Function,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Choose the loops of an async test, unless its folder does so."""
    return selection.loop_factories(item)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that this run does not include."""
    selection.select(config, items)


@pytest.fixture(scope="session", autouse=True)
def signals_for_children() -> None:
    """Let tests interrupt the programs that they start when the run ignores signals: `nohup make test &`."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            # A new program inherits SIG_IGN, and Python would install no handler for Ctrl-C. A handler that
            # does nothing has the same effect here, and is reset to the default by `exec`.
            signal.signal(number, lambda *_: None)


@pytest.fixture(params=selection.LINKS)
def link(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test over every link."""
    before, Links.current = Links.current, request.param
    yield request.param
    Links.current = before


@pytest.fixture
def address() -> Iterator[str]:
    """Return an address for a receiver, and check at the end that no file is left there."""
    with LINKS["unix"].place() as place:
        yield str(place.endpoint)
        assert not place.names()


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder whose path is short enough for sockets, unlike the folders of pytest."""
    with tempfile.TemporaryDirectory(prefix="aiotensor-") as path:
        yield Path(path)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Make two hosts with a cable between them."""
    with ExitStack() as made:
        try:
            hosts = made.enter_context(two_hosts())
        except NoNamespacesError as error:
            pytest.skip(str(error))
        yield hosts


@pytest.fixture
def moments() -> random.Random:
    """Choose moments at random: always the same in `make test`, and others in each run of `make test-all`."""
    seed = int(os.environ.get("AIOTENSOR_SEED", "0"))
    if not seed and selection.COMPLETE:
        seed = random.SystemRandom().getrandbits(32)
    print(f"AIOTENSOR_SEED={seed}")  # pytest shows it if the test fails
    return random.Random(seed)


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Disable the garbage collector, so that only objects without references are freed."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


_ENDING_S = 10.0  # more than any thread needs to end


def _left_since(before: dict[int, str]) -> dict[int, str]:
    return {number: what for number, what in our_descriptors().items() if before.get(number) != what}


@pytest.fixture(scope="module", autouse=True)
def few_objects_to_collect() -> None:
    """Exclude the objects of earlier modules from the garbage collections of a module."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def no_memory_left_behind() -> Iterator[None]:
    """Fail a module whose tests keep shared memory, which later modules would count as their own."""
    yield
    if watch.memfds(os.getpid()):
        gc.collect()
        _join_threads()  # a thread may still be unmapping freed memory
        assert not watch.memfds(os.getpid()), "a test of this module keeps a tensor"


def _join_threads() -> None:
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("aiotensor")]
    for thread in threads:
        thread.join(_ENDING_S)
    threads = [thread for thread in threads if thread.is_alive()]
    assert not threads, f"threads left behind: {threads}"


@pytest.fixture
async def nothing_left_behind() -> AsyncIterator[None]:
    """Fail an async test that leaves a descriptor or a thread of the library behind."""
    before = our_descriptors()
    yield
    _join_threads()
    left = _left_since(before)
    for _ in range(3 if left else 0):
        gc.collect()  # frees tensors, whose finalizers schedule a callback on the loop
        await asyncio.sleep(0)
        left = _left_since(before)
    assert not left, f"descriptors left behind: {left}"
