"""No call of a pipe keeps the loop busy for long."""

import asyncio
import collections
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from aiotensor import PeerLostError
from tests.conformance.turns import Lengths, measured, some_turns, too_long
from tests.ranks.pipes import ends, forget, with_child
from tests.selection import COMPLETE
from verification.internals import freed_of
from verification.processes import peers
from verification.waiting import until

_BYTES = 150 << 20

# What takes long takes as long with encryption.
pytestmark = [
    pytest.mark.usefixtures("route"),
    pytest.mark.parametrize("route", ["unix", "tcp"] if COMPLETE else ["unix"], indirect=True),
]


@pytest.fixture
def places(folder: Path) -> Iterator[Path]:
    """Return folders for the stores of the attempts: pipes of two attempts must not meet."""

    def make() -> Iterator[Path]:
        for number in itertools.count():
            place = folder / str(number)
            place.mkdir()
            yield place

    return make()


async def _take(state: peers.State) -> None:
    """Receive a tensor, and read all of it: from then on the memory is mapped here, page by page."""
    tensor = await state.others["pipe"].receive()
    assert int(tensor.sum()) == _BYTES
    state.tensors.append(tensor)


async def _receive_measured(state: peers.State) -> Lengths:
    lengths: Lengths = {}
    pipe = state.others["pipe"]
    with measured("receive", lengths):
        tensor = await pipe.receive()
        await some_turns()
    assert int(tensor.sum()) == _BYTES
    with measured("free what was received", lengths):
        del tensor
        await until(lambda: pipe.statistics().leases == 0)
        await some_turns()
    return lengths


async def _copy_measured(state: peers.State) -> Lengths:
    lengths: Lengths = {}
    with measured("receive a copy", lengths):
        state.tensors.append(await state.others["pipe"].receive(copy=True))
        await some_turns()
    assert int(state.tensors.pop().sum()) == _BYTES  # torch frees the memory of a copy, on this thread
    return lengths


async def _close_measured(state: peers.State) -> Lengths:
    lengths: Lengths = {}
    with measured("aclose of a rank that has received", lengths):
        await state.others["pipe"].aclose()
    return lengths


async def _wait_until_lost(state: peers.State) -> Lengths:
    lengths: Lengths = {}
    with measured("the other rank closes", lengths):
        await until(lambda: not state.others["pipe"].statistics().connected)
        await some_turns()
    with measured("free the last tensor of a rank that has closed", lengths):
        state.tensors.clear()
        await until(lambda: state.others["pipe"].statistics().leases == 0)
        await some_turns()
    return lengths


async def test_no_call_of_a_rank_that_sends_keeps_its_loop_busy_for_long(places: Iterator[Path]) -> None:
    source = torch.ones(_BYTES, dtype=torch.uint8)

    async def measure() -> Lengths:
        lengths: Lengths = {}
        async with with_child(next(places), max_bytes=_BYTES) as (pipe, child):
            sending = asyncio.create_task(pipe.send(source))
            with measured("cancel a copy", lengths):
                await until(lambda: pipe.statistics().bytes_in_use == _BYTES)
                sending.cancel()
                await until(lambda: pipe.statistics().bytes_in_use == 0)
                await some_turns()
            assert sending.cancelled()
            for what, tensor in (
                ("send", source),
                ("send what has to be gathered", torch.ones(_BYTES // 2, 3, dtype=torch.uint8)[:, 1:].t()),
            ):
                with measured(what, lengths):
                    await pipe.send(tensor)
                    await some_turns()
                calls = [asyncio.create_task(call) for call in (pipe.send(source), pipe.receive())]
                with measured("cancel calls that wait", lengths):
                    await until(lambda: pipe.statistics().waiting == 1)
                    for call in calls:
                        call.cancel()
                    await asyncio.wait(calls)
                    await some_turns()
                assert all(call.cancelled() for call in calls)
                taking = child.start(_take)
                with measured(f"drain after: {what}", lengths):
                    await pipe.drain()
                    await some_turns()
                await taking
                with measured(f"the other rank frees it after: {what}", lengths):
                    await child.call(forget)
                    await until(lambda: pipe.statistics().bytes_in_use == 0)
                    await some_turns()
            await pipe.send(source)
            await child.call(_take)
            with measured("aclose", lengths):
                await pipe.aclose()
                await some_turns()
        return lengths

    assert await too_long(measure) == {}


@pytest.mark.extended
async def test_no_call_of_a_rank_that_receives_keeps_its_loop_busy_for_long(places: Iterator[Path]) -> None:
    source = torch.ones(_BYTES, dtype=torch.uint8)

    async def measure() -> Lengths:
        async with with_child(next(places)) as (pipe, child):
            # In a new process, since the first use of a function may import modules.
            lengths: Lengths = {}
            for receive_measured in (_receive_measured, _copy_measured):
                await pipe.send(source)
                lengths |= await child.call(receive_measured)
            await pipe.send(source)
            await child.call(_take)
            closing = child.start(_wait_until_lost)
            await pipe.aclose()
            lengths |= await closing
        async with with_child(next(places)) as (pipe, child):
            await pipe.send(source)
            await child.call(_take)
            lengths |= await child.call(_close_measured)
            with pytest.raises(PeerLostError):
                await pipe.receive()
        return lengths

    assert await too_long(measure) == {}


class Preempted(collections.deque[Any]):
    """Freed items; the thread that appends one pauses before it looks whether they will be collected."""

    def __init__(self) -> None:
        self.has_appended, self.goes_on = threading.Event(), threading.Event()

    def append(self, item: object) -> None:
        super().append(item)
        if threading.current_thread() is not threading.main_thread():
            self.has_appended.set()
            assert self.goes_on.wait(20)


async def test_tensors_are_released_after_one_was_freed_in_a_thread_during_a_flush() -> None:
    tensor = torch.zeros(1 << 15)
    async with ends(max_bytes=4 * tensor.nbytes) as (low, high):
        for _ in range(3):
            await low.send(tensor)
        received = [await high.receive() for _ in range(3)]
        await until(lambda: low.statistics().in_flight == 0)  # no flush is scheduled any more
        items = freed_of(high).items = Preempted()
        thread = threading.Thread(target=received.pop)
        thread.start()
        assert items.has_appended.wait(20)
        await high.send(torch.zeros(3))  # which writes at once, together with the release
        items.goes_on.set()
        thread.join()
        await low.receive()
        received.clear()
        await until(lambda: low.statistics().bytes_in_use == 0)
