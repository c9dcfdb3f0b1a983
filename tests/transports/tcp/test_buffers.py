"""The memory of received messages."""

import platform
import resource

import pytest
import torch

from aiotensor import TensorReceiver, TensorSender
from verification.places import endpoint
from verification.processes import peers
from verification.processes.peers import State

COUNT, NBYTES = 50, 16 << 20
PAGES = COUNT * NBYTES // resource.getpagesize()

pytestmark = [
    pytest.mark.extended,
    pytest.mark.usefixtures("nothing_left_behind"),
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators keep what they want"),
]


async def page_faults(state: State) -> int:
    """Return the page faults of this process while tensors move from its sender to its receiver."""
    tensor = torch.ones(NBYTES, dtype=torch.uint8)
    async with TensorReceiver(state.endpoint) as receiver, TensorSender(state.endpoint) as sender:
        for _ in range(3):  # touch the memory of both sides for the first time
            await receiver.receive(await sender.send(tensor))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(COUNT):
            await receiver.receive(await sender.send(tensor))
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


async def test_memory_of_received_messages_is_used_again() -> None:
    with endpoint("tcp") as place:
        # In a new process, which has not freed a large tensor before.
        async with peers.peers(place, 1, method="spawn") as [peer]:
            assert await peer.call(page_faults) < PAGES // 100
