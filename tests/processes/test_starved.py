"""In a process without free descriptors, memory or addresses, waiting calls raise errors."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from aiotensor import RefusedError, TensorHandle, TensorReceiver, TensorSender
from aiotensor.codec import TensorDecoder, TensorEncoder
from tests.pairs import endpoint
from verification.patterns import BIG, pattern
from verification.processes import peers, watch

MIB, GIB = 1 << 20, 1 << 30


async def test_a_copy_without_memory_raises_os_error_and_the_tensor_stays_claimable() -> None:
    with endpoint("unix") as place:
        async with peers.peers(place, 1) as [child]:
            await child.call(_copy_without_memory)


async def _copy_without_memory(state: peers.State) -> None:
    tensor = pattern(0, 16 * MIB)  # 128 MiB
    async with TensorReceiver(state.endpoint) as receiver, TensorSender(state.endpoint) as sender:
        await receiver.receive(await sender.send(pattern(0, BIG)), copy=True)  # the threads exist now
        handle = await sender.send(tensor)
        await receiver.arrived(handle)
        with _addresses(_mapped_bytes() + 64 * MIB):
            with pytest.raises(OSError, match=f"{tensor.nbytes} bytes of memory") as caught:
                await receiver.receive(handle, copy=True)
            assert caught.value.errno == errno.ENOMEM
            assert torch.equal(await receiver.receive(handle), tensor)
        assert receiver.statistics().errors == {"OSError": 1}


async def test_encoding_a_message_without_memory_raises_os_error() -> None:
    with endpoint("unix") as place:
        async with peers.peers(place, 1) as [child]:
            await child.call(_encode_without_memory)


async def _encode_without_memory(state: peers.State) -> None:
    unviewable = np.zeros(128 * MIB, np.uint8)[::-1]
    encoder = TensorEncoder()
    read_only = [bytes(part) for part in encoder.encode(torch.zeros(128 * MIB, dtype=torch.uint8))]
    with _addresses(_mapped_bytes() + 64 * MIB):
        for work in lambda: encoder.encode(unviewable), lambda: TensorDecoder(torch.Tensor).decode(read_only):
            with pytest.raises(OSError, match=f"{128 * MIB} bytes of memory") as caught:
                work()
            assert caught.value.errno == errno.ENOMEM


async def test_a_receiver_without_enough_address_space_refuses_a_sender() -> None:
    with endpoint("unix") as place:
        async with peers.peers(place, 1) as [child], TensorSender(place, arena_bytes=GIB) as sender:
            await child.call(_open_with_2_gib_of_addresses)
            handle = await sender.send(pattern(0, BIG))
            with pytest.raises(
                RefusedError, match=f"{4 * GIB} bytes of addresses.*raise `ulimit -v`"
            ) as ours:
                await sender.drain()
            assert ours.value.pid == child.pid
            assert "raise `ulimit -v`" in await child.call(_refused, handle)
            await child.call(peers.close_receiver)


@contextmanager
def _addresses(limit: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


async def _open_with_2_gib_of_addresses(state: peers.State) -> None:
    await peers.open_receiver(state)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_mapped_bytes() + 2 * GIB, hard))


def _mapped_bytes() -> int:
    return 1024 * watch.status(os.getpid(), "VmSize")


async def _refused(state: peers.State, handle: TensorHandle) -> str:
    with pytest.raises(RefusedError) as caught:
        await state.receiver.receive(handle)
    return str(caught.value)
