"""The other rank in another process, which is killed, stopped or closed while messages travel."""

import asyncio
import os
import random
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from aiotensor import PeerLostError
from aiotensor.ranks import RankPipe
from tests.ranks.pipes import ROUTES, Routes, echo, receive, send, with_child
from tests.selection import COMPLETE
from verification.patterns import BIG, pattern
from verification.processes import watch
from verification.processes.peers import Peer
from verification.promptly import promptly
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("route")

_SOME = 5_000
_KILLS = int(os.environ.get("AIOTENSOR_KILLS", "40")) // (8 if COMPLETE else 20)


_COUNTS = [10, None, _SOME, BIG, 4 * BIG, 0]


async def test_messages_pass_between_two_processes_and_descriptors_do_not_grow(folder: Path) -> None:
    async with with_child(folder) as (pipe, child):
        numbers = []
        for _ in range(3):
            await _exchange(pipe, child)
            numbers.append((watch.descriptors(os.getpid()), watch.descriptors(child.pid)))
        assert len(set(numbers[1:])) == 1


async def _exchange(pipe: RankPipe, child: Peer) -> None:
    receiving = child.start(receive, 0, len(_COUNTS))
    for seed, count in enumerate(_COUNTS):
        await pipe.send(None if count is None else pattern(seed, count))
    assert await receiving
    sending = child.start(send, 0, _COUNTS)
    for seed, count in enumerate(_COUNTS):
        received = await pipe.receive()
        assert (received is None) == (count is None)
        assert received is None or torch.equal(received, pattern(seed, received.numel()))
    await sending


@pytest.mark.promise(10)
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_killed_rank_ends_all_calls_within_a_second(
    folder: Path, rank: int, moments: random.Random
) -> None:
    for number in range(_KILLS):
        place = folder / str(number)
        place.mkdir()
        async with with_child(place, rank=rank, max_bytes=4 * BIG * 8) as (pipe, child):
            child.start(echo)
            sending = asyncio.ensure_future(_send_for_ever(pipe.send))
            receiving = asyncio.ensure_future(_receive_for_ever(pipe.receive))
            await asyncio.sleep(moments.random() * 0.05)
            child.kill()
            with promptly():
                for call in (sending, receiving):
                    with pytest.raises(PeerLostError):
                        await call
            assert pipe.statistics().in_flight == 0
            await until(lambda: pipe.statistics().bytes_in_use == 0)  # once its process has ended
            with pytest.raises(PeerLostError):
                await pipe.send(None)


async def _send_for_ever(send: object) -> None:
    assert callable(send)
    number = 0
    while True:
        await send([None, pattern(number, 10), pattern(number, _SOME), pattern(number, BIG)][number % 4])
        number += 1


async def _receive_for_ever(receive: object) -> None:
    assert callable(receive)
    while True:
        await receive()


@pytest.mark.promise(9)
async def test_messages_that_had_arrived_survive_the_death_of_their_sender(folder: Path) -> None:
    async with with_child(folder) as (pipe, child):
        await child.call(send, 0, [10, None, _SOME, BIG])
        await until(lambda: pipe.statistics().unclaimed == 4)
        child.kill()
        await child.ended()
        await until(lambda: not pipe.statistics().connected)
        kept: list[Any] = []
        for seed, count in ((0, 10), (None, 0), (2, _SOME), (3, BIG)):
            received = await pipe.receive()
            assert (received is None) == (seed is None)
            assert received is None or torch.equal(received, pattern(seed or 0, count))
            kept.append(received)
        with pytest.raises(PeerLostError):
            await pipe.receive()
    assert torch.equal(kept[-1], pattern(3, BIG))
    received = None
    kept.clear()
    await until(lambda: not watch.memfds(os.getpid()))


async def test_a_stopped_rank_delays_only_messages_beyond_the_limit(folder: Path) -> None:
    options: dict[str, Any] = {} if Routes.current.is_local else {"peer_timeout_s": 60.0}
    async with with_child(folder, max_bytes=3 * BIG * 8, **options) as (pipe, child):
        await child.stop()
        for seed in range(3):
            await pipe.send(pattern(seed, BIG))
        waiting = asyncio.ensure_future(pipe.send(pattern(3, BIG)))
        await until(lambda: pipe.statistics().waiting == 1)
        child.go_on()
        assert await child.call(receive, 0, 4)
        await waiting
        await pipe.drain()


@pytest.mark.extended
@pytest.mark.promise(20)
@pytest.mark.parametrize("route", list(ROUTES) if COMPLETE else ["unix"], indirect=True)
async def test_an_idle_pipe_uses_no_processor_time(folder: Path) -> None:
    async with AsyncExitStack() as stack:
        pids = []
        for rank in (0, 1):
            place = folder / str(rank)
            place.mkdir()
            pipe, child = await stack.enter_async_context(with_child(place, rank=rank))
            await pipe.send(pattern(0, BIG))
            assert await child.call(receive, 0, 1)
            await pipe.drain()
            pids.append(child.pid)
        assert await watch.become_idle(pids)
