"""Senders and receivers on two hosts: slow and lossy cables, cut cables, and killed processes."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import pytest
import torch
import zmq
from _pytest.mark import ParameterSet

from aiotensor import PeerLostError, TensorHandle, TensorReceiver, TensorSender
from verification.networks import Host, Hosts, NoNamespacesError
from verification.patterns import BIG, pattern
from verification.processes.peers import Peer, State
from verification.promptly import promptly
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

TIMEOUT_S = 2.0  # `peer_timeout_s` by default; a lost host is detected at most a second later
LARGE = 4 << 20  # elements of int64 that take many steps


def _extended(value: str) -> ParameterSet:
    return pytest.param(value, marks=pytest.mark.extended)


class Keys(NamedTuple):
    """The keys of one listening side, and of all connecting sides."""

    listening: dict[str, Any]
    connecting: dict[str, Any]

    @classmethod
    def new(cls) -> "Keys":
        server_public, server_secret = zmq.curve_keypair()
        public, secret = zmq.curve_keypair()
        listening = {"secret_key": server_secret, "client_keys": [public]}
        return cls(listening, {"secret_key": secret, "server_key": server_public})


@pytest.fixture
def keys() -> Keys:
    return Keys.new()


@asynccontextmanager
async def processes(hosts: Hosts, *places: Host) -> AsyncIterator[list[Peer]]:
    """Start a process on each of some hosts, for an endpoint at the first one; end them with the block."""
    async with AsyncExitStack() as stack:
        started = []
        for place in places:
            started.append(Peer(f"tcp://{hosts.a.address}:5556", first=place.enter))
            stack.push_async_callback(started[-1].close)
        yield started


async def open_receiver(state: State, keys: Keys) -> None:
    receiver = TensorReceiver(state.endpoint, **keys.listening)
    state.receivers.append(await receiver.__aenter__())


async def open_sender(state: State, /, keys: Keys, **options: Any) -> None:
    sender = TensorSender(state.endpoint, **options, **keys.connecting)
    state.senders.append(await sender.__aenter__())
    await sender.ready()


async def send(state: State, count: int, length: int, first: int = 0) -> list[TensorHandle]:
    return [await state.sender.send(pattern(seed, length)) for seed in range(first, first + count)]


async def begin_to_send(state: State, nbytes: int) -> None:
    await until(lambda: state.sender.statistics().bytes_in_use == nbytes)


async def receive_all(state: State, handles: list[TensorHandle], first: int = 0) -> bool:
    """Receive tensors in random order, and return whether all have the right values."""
    seeds = {handle: seed for seed, handle in enumerate(handles, first)}
    random.shuffle(handles)
    return all(
        [
            torch.equal(await state.receiver.receive(handle), pattern(seeds[handle], handle.shape[0]))
            for handle in handles
        ]
    )


async def receive(state: State) -> int:
    """Receive the next tensor, and return its number of elements."""
    return (await anext(state.receiver)).tensor.numel()


async def receive_lost(state: State, handle: TensorHandle) -> str:
    """Wait for a tensor that never arrives, and return the error."""
    with pytest.raises(PeerLostError) as caught:
        await state.receiver.receive(handle)
    return str(caught.value)


async def send_until_lost(state: State, length: int) -> str:
    """Send until the receiver is lost, and return the error."""
    with pytest.raises(PeerLostError) as caught:
        while True:
            await state.sender.send(pattern(0, length))
    return str(caught.value)


async def drain_until_lost(state: State) -> str:
    with pytest.raises(PeerLostError) as caught:
        await state.sender.drain()
    return str(caught.value)


async def lost_receivers(state: State, count: int) -> tuple[int, int]:
    """Wait until so many receivers were lost, and all memory is free; return the messages in flight, too."""
    await until(lambda: state.sender.statistics().receivers_lost == count)
    await until(lambda: state.sender.statistics().bytes_in_use == 0)
    statistics = state.sender.statistics()
    return statistics.in_flight, statistics.receivers_lost


async def lost_senders(state: State, count: int) -> int:
    """Wait until so many senders were lost, and return the mapped bytes."""
    await until(lambda: state.receiver.statistics().senders_lost == count)
    return state.receiver.statistics().mapped_bytes


# Values


@pytest.mark.extended
@pytest.mark.parametrize("network", ["1 Gbit/s", "2 % loss"])
async def test_values_are_exact_over_slow_and_lossy_cables(hosts: Hosts, keys: Keys, network: str) -> None:
    if network == "1 Gbit/s":
        hosts.slow_down(1000)
    else:
        try:
            hosts.lose_some(2)
        except NoNamespacesError as error:
            pytest.skip(str(error))
    async with processes(hosts, hosts.a, hosts.b) as (engine, server):
        await engine.call(open_receiver, keys)
        await server.call(open_sender, keys, max_concurrent_videos=100)
        for length in (3, 5000, BIG):
            handles = await server.call(send, 8, length)
            assert await engine.call(receive_all, handles)
        handles = await server.call(send, 2, LARGE)
        assert await engine.call(receive_all, handles)


@pytest.mark.extended
async def test_a_small_tensor_overtakes_a_large_one_on_a_slow_network(hosts: Hosts, keys: Keys) -> None:
    hosts.slow_down(500)
    async with processes(hosts, hosts.a, hosts.b) as (engine, server):
        await engine.call(open_receiver, keys)
        await server.call(open_sender, keys, arena_bytes=512 << 20)
        sending = server.start(send, 1, 16 << 20)
        await server.call(begin_to_send, 128 << 20)
        for length in (3, 5000):
            handles = await server.call(send, 1, length, first=1)
            assert await engine.call(receive_all, handles, first=1)
        assert not sending.done()
        assert await engine.call(receive_all, await sending)


# Failures


@pytest.mark.promise(36)
@pytest.mark.parametrize("phase", [_extended("idle"), "sending", _extended("receiving")])
async def test_a_cut_cable_is_detected_on_both_sides_and_a_healed_one_is_used_again(
    hosts: Hosts, keys: Keys, phase: str
) -> None:
    async with processes(hosts, hosts.a, hosts.b) as (engine, server):
        await engine.call(open_receiver, keys)
        await server.call(open_sender, keys, arena_bytes=512 << 20)
        handles = await server.call(send, 1, 3)
        assert await engine.call(receive_all, handles)
        if phase == "sending":  # steps are under way, whenever the cable is cut
            hosts.slow_down(500)
            failing = [server.start(send_until_lost, 16 << 20)]
            await engine.call(receive)
        elif phase == "receiving":
            beyond = TensorHandle(handles[0].sender, 100, 0, "int64", (3,), "cpu")
            failing = [engine.start(receive_lost, beyond)]
        else:
            failing = []
        hosts.cut()
        with promptly(TIMEOUT_S + 1):
            in_use, mapped = server.start(lost_receivers, 1), engine.start(lost_senders, 1)
            for failure in failing:
                assert "did not answer for 2 s" in await failure
            assert await in_use == (0, 1)
            assert await mapped == 0
        hosts.heal()
        handles = await server.call(send, 2, BIG, first=50)
        assert await engine.call(receive_all, handles, first=50)


@pytest.mark.extended
@pytest.mark.parametrize("direction", ["to the receiver", "to the sender"])
async def test_a_cable_cut_in_one_direction_is_detected_on_both_sides(
    hosts: Hosts, keys: Keys, direction: str
) -> None:
    async with processes(hosts, hosts.a, hosts.b) as (engine, server):
        await engine.call(open_receiver, keys)
        await server.call(open_sender, keys)
        ends = (hosts.b, hosts.a) if direction == "to the receiver" else (hosts.a, hosts.b)
        hosts.cut_one_way(*ends)
        with promptly(TIMEOUT_S + 1):
            await asyncio.gather(server.start(lost_receivers, 1), engine.start(lost_senders, 1))


@pytest.mark.promise(36)
@pytest.mark.parametrize("phase", [_extended("idle"), "sending"])
async def test_a_killed_process_is_detected_within_a_second(hosts: Hosts, keys: Keys, phase: str) -> None:
    async with processes(hosts, hosts.a, hosts.b, hosts.a) as (engine, server, following):
        await engine.call(open_receiver, keys)
        await server.call(open_sender, keys)
        handles = await server.call(send, 1, 3)
        assert await engine.call(receive_all, handles)
        if phase == "sending":
            failing = server.start(send_until_lost, LARGE)
            await engine.call(receive)
        else:
            await server.call(send, 1, 3)
            failing = server.start(drain_until_lost)
        engine.kill()
        with promptly():
            assert "was lost" in await failing
            assert await server.call(lost_receivers, 1) == (0, 1)
        await engine.ended()
        await following.call(open_receiver, keys)
        handles = await server.call(send, 1, BIG)
        assert await following.call(receive_all, handles)
        server.kill()
        with promptly():
            assert await following.call(lost_senders, 1) == 0
