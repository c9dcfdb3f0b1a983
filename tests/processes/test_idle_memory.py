"""Memory follows use: a small tensor that lives keeps no large idle memory, in no process."""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest
import torch

from aiotensor import TensorHandle, TensorReceiver, TensorSender
from aiotensor.transports.endpoints import Endpoint
from tests import selection
from verification.patterns import pattern
from verification.places import LINKS
from verification.processes import peers, watch
from verification.processes.peers import Peer, State
from verification.waiting import settled, until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

MIB = 1 << 20
ARENA = 64 * MIB
LARGE, SMALL = 48 * MIB // 8, 16 * 1024 // 8  # elements of int64


@pytest.fixture(params=selection.LINKS)
def place(request: pytest.FixtureRequest) -> Iterator[Endpoint]:
    """Name a place for a receiver on each transport."""
    with LINKS[request.param].place() as place:
        yield place.endpoint


def shared_mib() -> int:
    """Count the shared memory that this process has touched and the system still keeps."""
    return watch.status(os.getpid(), "RssShmem") >> 10


async def allocate(state: State, seed: int) -> None:
    tensor = await state.sender.allocate((SMALL,), torch.int64)
    state.tensors.append(tensor.copy_(pattern(seed, SMALL)))


async def send_allocated(state: State, seed: int) -> TensorHandle:
    await allocate(state, seed)
    return await state.sender.send(state.tensors[-1])


async def has_kept(state: State, seed: int) -> bool:
    return torch.equal(state.tensors[-1], pattern(seed, SMALL))


async def end(peer: Peer, how: str) -> None:
    if how == "kill":
        peer.kill()
        await peer.ended()
    else:
        await peer.call(peers.close_sender)


async def receive_both(receiver: TensorReceiver, peer: Peer, generation: int) -> torch.Tensor:
    """Receive a large and a small tensor, and keep the small one."""
    large = await peer.call(peers.send_pattern, generation, LARGE)
    small = await peer.call(peers.send_pattern, generation, SMALL)
    assert (await receiver.receive(large)).sum() > 0
    return await receiver.receive(small)


@pytest.mark.promise(30)
@pytest.mark.parametrize("how", ["close", "kill"])
async def test_a_small_view_keeps_no_other_memory_of_an_ended_sender(place: Endpoint, how: str) -> None:
    before = shared_mib()
    async with (
        peers.peers(place, 2) as senders,
        TensorReceiver(place, max_mapped_bytes=2 * ARENA) as receiver,
    ):
        kept = []
        for generation, peer in enumerate(senders):
            await peer.call(peers.open_sender, 8, ARENA)
            kept.append(await receive_both(receiver, peer, generation))
            await end(peer, how)
            await until(lambda: receiver.statistics().senders == 0)
            await until(lambda: receiver.statistics().mapped_bytes < MIB)
            await until(lambda: shared_mib() <= before + 1)
        assert all(torch.equal(tensor, pattern(seed, SMALL)) for seed, tensor in enumerate(kept))
        kept.clear()
        await until(lambda: receiver.statistics().mapped_bytes == 0)


@pytest.mark.parametrize("place", selection.LOCAL_LINKS, indirect=True)
@pytest.mark.parametrize("is_sent", [True, False], ids=["sent", "unsent"])
async def test_a_tensor_in_use_by_a_closed_sender_is_kept_until_its_process_ends(
    place: Endpoint, is_sent: bool
) -> None:
    async with peers.peers(place, 1) as [peer], TensorReceiver(place) as receiver:
        await peer.call(peers.open_sender, 8, ARENA)
        kept = await receive_both(receiver, peer, 1)
        if is_sent:
            handle = await peer.call(send_allocated, 7)
            assert torch.equal(await receiver.receive(handle), pattern(7, SMALL))
        else:
            await peer.call(allocate, 7)
        await peer.call(peers.close_sender)
        await until(lambda: receiver.statistics().senders == 0)
        assert await peer.call(has_kept, 7)
        assert receiver.statistics().mapped_bytes == ARENA
        peer.kill()
        await until(lambda: receiver.statistics().mapped_bytes < MIB)
        assert torch.equal(kept, pattern(1, SMALL))


@pytest.mark.promise(30)
@pytest.mark.parametrize("how", ["close", "kill"])
async def test_a_small_allocated_tensor_keeps_no_other_memory_over_engine_restarts(
    address: str, how: str
) -> None:
    async with peers.peers(address, 3) as engines, TensorSender(address, 4, ARENA) as sender:
        kept: list[torch.Tensor] = []
        descriptors = watch.descriptors(os.getpid())
        for generation, engine in enumerate(engines):
            await engine.call(peers.open_receiver)
            tensor = await sender.allocate((SMALL,), torch.int64)
            kept.append(tensor.copy_(pattern(generation, SMALL)))
            handle = await sender.send(pattern(generation, LARGE))
            assert await engine.call(peers.receive_pattern, handle, generation, keep=how == "kill")
            await sender.send(pattern(generation, SMALL))  # it is on its way when the engine ends
            if how == "kill":
                engine.kill()
                await engine.ended()
            else:
                await engine.call(peers.close_receiver)
            await until(lambda: sender.statistics().in_flight == 0)
            await until(lambda: sender.statistics().warm_bytes <= ARENA + 2 * MIB)
            # If the segment of this one is completely unused, the next one has its segment already.
            await until(lambda: watch.descriptors(os.getpid()) <= descriptors + 3)  # with both ends of a pipe
        assert all(torch.equal(tensor, pattern(seed, SMALL)) for seed, tensor in enumerate(kept))


async def test_memory_in_use_by_a_closed_receiver_is_kept_until_its_process_ends(address: str) -> None:
    async with peers.peers(address, 2) as [old, new], TensorSender(address, 4, ARENA) as sender:
        await old.call(peers.open_receiver)
        tensor = await sender.allocate((SMALL,), torch.int64)
        handle = await sender.send(pattern(1, LARGE))
        assert await old.call(peers.receive_pattern, handle, 1, keep=True)
        await old.call(peers.close_receiver)
        await new.call(peers.open_receiver)
        for seed in range(3):
            assert await new.call(peers.receive_pattern, await sender.send(pattern(seed, LARGE)), seed)
        assert await old.call(still_equals, 1)
        assert sender.statistics().warm_bytes > ARENA
        old.kill()
        await until(lambda: sender.statistics().warm_bytes <= ARENA + 2 * MIB)
        del tensor
        await settled(sender)


async def still_equals(state: State, seed: int) -> bool:
    return all(torch.equal(tensor, pattern(seed, tensor.numel())) for tensor in state.tensors)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
async def test_a_forked_child_keeps_neither_memory_nor_descriptors_of_the_library(place: Endpoint) -> None:
    async with peers.peers(place, 1) as [peer], TensorReceiver(place) as receiver:
        await peer.call(peers.open_sender, 8, ARENA)
        tensor = await receiver.receive(await peer.call(peers.send_pattern, 1, LARGE))
        assert watch.memfds(os.getpid()) == watch.memfds(peer.pid) == 1
        children = [await peers.fork_and_sleep(State(place)), await peer.call(peers.fork_and_sleep)]
        try:
            for child in children:
                await until(lambda child=child: not kept_by(child))  # type: ignore[misc]
            assert torch.equal(tensor, pattern(1, LARGE))
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
            await asyncio.to_thread(os.waitpid, children[0], 0)
        del tensor


def kept_by(pid: int) -> list[str]:
    """List the memory, sockets and files that a process has because of the library."""
    found = [target for target in watch.targets(pid) if "memfd" in target]
    return found + ["memory"] * watch.memfds(pid)
