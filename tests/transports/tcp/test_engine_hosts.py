"""Tensors that NIXL moves between two hosts, over a slow cable: losses and cancellation in the middle."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
import zmq

from aiotensor import PeerLostError, TensorHandle, TensorReceiver, TensorSender
from verification.networks import Hosts, NoNamespacesError
from verification.processes.peers import Peer, State
from verification.promptly import allowed_s
from verification.waiting import settled, until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

TIMEOUT_S = 1.0
PORT = 5556
BYTES = 32 << 20  # more than a second at this rate
MBIT_S = 200
MIDDLE = 8 << 20


def keep_lines(state: State) -> None:
    """Keep the lines that this process logs about engines."""
    lines = state.others["lines"] = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("aiotensor.transports").addHandler(handler)


async def open_receiver(state: State, /, **options: Any) -> None:
    keep_lines(state)
    receiver = TensorReceiver(state.endpoint, engine="nixl", peer_timeout_s=TIMEOUT_S, **options)
    state.receivers.append(await receiver.__aenter__())


async def open_sender(state: State, /, **options: Any) -> None:
    keep_lines(state)
    sender = TensorSender(state.endpoint, 8, BYTES, engine="nixl", peer_timeout_s=TIMEOUT_S, **options)
    state.senders.append(await sender.__aenter__())
    await sender.ready()


async def has_engine(state: State) -> None:
    """Wait until the engine is used."""
    objects: list[Any] = [*state.senders, *state.receivers]
    await until(lambda: all(one.statistics().engine_connections == 1 for one in objects))


def filled(value: int) -> torch.Tensor:
    return torch.full((BYTES,), value, dtype=torch.uint8)


async def begin_send(state: State, value: int) -> None:
    """Begin to send a tensor."""
    state.others[f"send {value}"] = asyncio.create_task(state.sender.send(filled(value)))


async def end_of_send(state: State, value: int) -> tuple[float, str]:
    """Wait for the end of a send, and return when it was, and the name of its error."""
    try:
        await state.others[f"send {value}"]
    except PeerLostError as error:
        ended = time.monotonic()
        await settled(state.sender)  # the memory is returned, too
        return ended, type(error).__name__
    return time.monotonic(), ""


async def lost_sender(state: State) -> float:
    """Wait until the sender is lost, and return when it was."""
    await until(lambda: state.receiver.statistics().senders_lost == 1)
    return time.monotonic()


async def cancel_and_send(state: State, cancelled: int, value: int) -> TensorHandle:
    """Cancel a send, and send another tensor, which needs the same memory."""
    task = state.others[f"send {cancelled}"]
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert state.sender.statistics().bytes_in_use == BYTES
    return await state.sender.send(filled(value))


async def send(state: State, value: int) -> TensorHandle:
    return await state.sender.send(filled(value))


async def first_line(state: State) -> str:
    """Wait for the first logged line about engines, and return it."""
    lines: list[str] = state.others["lines"]
    await until(lambda: bool(lines))
    return lines[0]


async def receive_twice(state: State, handle: TensorHandle, value: int) -> bool:
    """Receive a tensor, and return whether it has its value then, and after a while."""
    tensor = await state.receiver.receive(handle)
    is_right = bool((tensor == value).all())
    await asyncio.sleep(0.5)  # bytes of another write would arrive now
    return is_right and bool((tensor == value).all())


async def receive_next(state: State, value: int) -> bool:
    """Receive the next tensor, and return whether it has its value."""
    delivery = await anext(aiter(state.receiver))
    return bool((delivery.tensor == value).all())


async def engine_connections(state: State) -> int:
    """Return the number of connections with an engine."""
    objects: list[Any] = [*state.senders, *state.receivers]
    return sum(one.statistics().engine_connections for one in objects)


@asynccontextmanager
async def two_processes(hosts: Hosts) -> AsyncIterator[tuple[Peer, Peer]]:
    """Open a receiver on one host and a sender on the other."""
    server_public, server_secret = zmq.curve_keypair()
    public, secret = zmq.curve_keypair()
    endpoint = f"tcp://{hosts.a.address}:{PORT}"
    engine, api = Peer(endpoint, first=hosts.a.enter), Peer(endpoint, first=hosts.b.enter)
    try:
        await engine.call(open_receiver, secret_key=server_secret, client_keys=[public])
        await api.call(open_sender, secret_key=secret, server_key=server_public)
        yield engine, api
    finally:
        await engine.close()
        await api.close()


@asynccontextmanager
async def sending(hosts: Hosts) -> AsyncIterator[tuple[Peer, Peer]]:
    """Do the same, and begin to send a tensor with the engine, over a slow cable."""
    async with two_processes(hosts) as (engine, api):
        await asyncio.gather(engine.call(has_engine), api.call(has_engine))
        hosts.slow_down(MBIT_S)
        before = hosts.a.bytes_arrived()
        await api.call(begin_send, 1)
        while hosts.a.bytes_arrived() - before < MIDDLE:
            await asyncio.sleep(0.01)
        yield engine, api


async def test_a_receiver_that_is_killed_during_a_write_is_an_error_within_a_second(hosts: Hosts) -> None:
    async with sending(hosts) as (engine, api):
        killed = time.monotonic()
        engine.kill()
        ended, error = await api.call(end_of_send, 1)
        assert error == "PeerLostError"
        assert ended - killed < 1 or ended - killed < allowed_s(1.0)


async def test_a_sender_that_is_killed_during_a_write_is_reported_within_a_second(hosts: Hosts) -> None:
    async with sending(hosts) as (engine, api):
        killed = time.monotonic()
        api.kill()
        took = await engine.call(lost_sender) - killed
        assert took < 1 or took < allowed_s(1.0)


async def test_a_cable_that_is_cut_during_a_write_is_an_error_within_the_timeout(hosts: Hosts) -> None:
    async with sending(hosts) as (engine, api):
        cut = time.monotonic()
        hosts.cut()
        lost = engine.start(lost_sender)
        ended, error = await api.call(end_of_send, 1)
        assert error == "PeerLostError"
        longest = max(ended, await lost) - cut
        assert longest < TIMEOUT_S + 1 or longest < allowed_s(TIMEOUT_S + 1)


async def test_a_block_is_not_used_again_before_a_cancelled_write_has_ended(hosts: Hosts) -> None:
    async with sending(hosts) as (engine, api):
        handle = await api.call(cancel_and_send, 1, 2)
        assert await engine.call(receive_twice, handle, 2)


async def test_a_write_to_a_stopped_receiver_resumes_when_it_continues(hosts: Hosts) -> None:
    async with sending(hosts) as (engine, api):
        await engine.stop()
        await asyncio.sleep(TIMEOUT_S / 4)
        engine.go_on()
        assert (await api.call(end_of_send, 1))[1] == ""


async def test_zeromq_carries_the_rest_if_the_connection_of_the_engine_is_reset(hosts: Hosts) -> None:
    async with sending(hosts) as (engine, api):
        await api.call(begin_send, 2)
        try:
            hosts.reset_other_connections(PORT)
        except NoNamespacesError as error:
            pytest.skip(str(error))
        for value in (1, 2):
            assert (await api.call(end_of_send, value))[1] == ""
            assert await engine.call(receive_next, value)
        for end in (engine, api):
            assert "ZeroMQ carries all tensors" in await end.call(first_line)
            assert await end.call(engine_connections) == 0


async def test_zeromq_carries_all_tensors_if_the_connection_of_an_idle_engine_was_reset(hosts: Hosts) -> None:
    async with two_processes(hosts) as (engine, api):
        await asyncio.gather(engine.call(has_engine), api.call(has_engine))
        try:
            hosts.reset_other_connections(PORT)
        except NoNamespacesError as error:
            pytest.skip(str(error))
        for value in (1, 2):
            await api.call(send, value)
            assert await engine.call(receive_next, value)
        for end in (engine, api):
            assert "ZeroMQ carries all tensors" in await end.call(first_line)
            assert await end.call(engine_connections) == 0


async def test_a_firewall_leaves_all_tensors_to_zeromq(hosts: Hosts) -> None:
    hosts.block_other_ports(PORT)
    async with two_processes(hosts) as (engine, api):
        for end in (engine, api):
            assert "check whether a firewall blocks it" in await end.call(first_line)
        handle = await api.call(send, 1)
        assert await engine.call(receive_twice, handle, 1)
