"""Pipes between ranks: both ends in one process, or one of them in another."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed import FileStore, HashStore  # type: ignore[attr-defined]

from aiotensor import PeerLostError
from aiotensor.protocol.frames import VERSION
from aiotensor.ranks import RankPipe, meeting
from tests.selection import MODES
from verification.patterns import pattern
from verification.processes.peers import Peer, State


class Route(NamedTuple):
    """One way between two ranks.

    Attributes:
        is_local: whether both ends know that they run on one machine.
        options: further arguments of both ends.
    """

    is_local: bool
    options: dict[str, Any]


_LOOPBACK = {"host": "127.0.0.1"}

ROUTES = {
    "unix": Route(is_local=True, options={}),
    "tcp": Route(is_local=False, options=_LOOPBACK),
    "encrypted": Route(is_local=False, options={**_LOOPBACK, "encrypt": True}),
}


# Run a test, or all tests of a module, in each mode of the loop.
in_every_mode = pytest.mark.parametrize("mode", MODES, indirect=True)


class Routes:
    """The route of the running test, set by the fixture `route` of conftest.py."""

    current = ROUTES["unix"]


class Ends(NamedTuple):
    """Both ends of a pipe."""

    low: RankPipe
    high: RankPipe


@contextmanager
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let each end of a pipe in this process state another machine."""
    with monkeypatch.context() as patch:
        patch.setattr(meeting, "machine_of_this_process", lambda: secrets.token_hex(8))
        yield


def meeting_of(store: Any, rank: int, max_bytes: int = 1 << 30) -> meeting.Meeting:
    """Return the meeting of an end with the options of the route, which only exchanges entries."""
    host, encrypt = Routes.current.options.get("host", ""), Routes.current.options.get("encrypt", False)
    settings = f"max_bytes={max_bytes}, encrypt={encrypt} and protocol {VERSION}"
    entry = meeting.Entry(settings, host=host)
    return meeting.Meeting(store, rank, 1 - rank, entry, None, encrypt=encrypt)


async def opened(*pipes: RankPipe) -> None:
    """Open both ends of pipes at once."""

    async def open_one(pipe: RankPipe) -> None:  # a result would keep the pipe alive
        await pipe.__aenter__()

    await asyncio.gather(*map(open_one, pipes))


@asynccontextmanager
async def ends(**options: Any) -> AsyncIterator[Ends]:
    """Open both ends of a pipe in this process."""
    store = HashStore()
    options = {**Routes.current.options, **options}
    low, high = (RankPipe(store, 1 - rank, rank=rank, world_size=2, **options) for rank in range(2))
    async with AsyncExitStack() as stack:
        for pipe in (low, high):
            stack.push_async_exit(pipe)
        await opened(low, high)
        yield Ends(low, high)


# Functions to run in a child, whose endpoint is the path of a store.


async def open_pipe(state: State, /, rank: int, machine: str | None = None, **options: Any) -> None:
    """Open an end, and keep it.

    Args:
        state: the state of the child.
        rank: the rank of the child.
        machine: the machine that it states; None for the real one.
        options: further arguments of the pipe.
    """
    if machine is not None:
        meeting.machine_of_this_process = lambda: machine
    store = FileStore(str(state.endpoint), 2)
    pipe = RankPipe(store, 1 - rank, rank=rank, world_size=2, **options)
    state.others["pipe"] = await state.stack.enter_async_context(pipe)


async def send(state: State, first: int, counts: list[int | None]) -> None:
    """Send patterns of these lengths, and None for None; the seed of each is one more than the last."""
    for seed, count in enumerate(counts, first):
        await state.others["pipe"].send(None if count is None else pattern(seed, count))


async def receive(state: State, first: int, count: int, *, keep: bool = False) -> bool:
    """Receive messages, and return whether they are the patterns that `send` sends."""
    is_right = True
    for seed in range(first, first + count):
        tensor = await state.others["pipe"].receive()
        is_right &= tensor is None or torch.equal(tensor, pattern(seed, tensor.numel()))
        if keep:
            state.tensors.append(tensor)
    return is_right


async def echo(state: State) -> None:
    """Return each message until the other end is gone."""
    pipe = state.others["pipe"]
    with suppress(PeerLostError):
        while True:
            await pipe.send(await pipe.receive())


async def forget(state: State) -> None:
    """Free all tensors."""
    state.tensors.clear()


@asynccontextmanager
async def with_child(folder: Path, *, rank: int = 1, **options: Any) -> AsyncIterator[tuple[RankPipe, Peer]]:
    """Open one end here, and the other in a child.

    Args:
        folder: the folder for the store.
        rank: the rank of the child.
        options: further arguments of both ends.
    """
    route, path = Routes.current, str(folder / "store")
    child = Peer(path)
    try:
        store = FileStore(path, 2)
        pipe = RankPipe(store, rank, rank=1 - rank, world_size=2, **route.options, **options)
        machine = None if route.is_local else "the machine of the child"
        opening = child.start(open_pipe, rank, machine, **route.options, **options)
        async with pipe:
            await opening
            yield pipe, child
    finally:
        await child.close()
