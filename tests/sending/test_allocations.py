from collections.abc import AsyncIterator

import pytest
import torch

from aiotensor.memory.arena import Block
from aiotensor.memory.memory import Memory
from aiotensor.memory.placement import plan_placement
from aiotensor.statistics.counters import new_counts
from aiotensor.types import SenderStatistics
from tests.memory.segments import MIB

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

LARGE = MIB  # a tensor that is copied if it is not in an allocated block


@pytest.fixture
async def memory() -> AsyncIterator[Memory]:
    counts = new_counts(SenderStatistics)
    memory = Memory(8 * MIB, None, counts)
    yield memory
    await memory.aclose()


async def allocate(
    memory: Memory, *shape: int, dtype: torch.dtype = torch.uint8
) -> tuple[torch.Tensor, Block]:
    block = await memory.acquire(torch.Size(shape).numel() * dtype.itemsize)
    return await memory.tensor_over(block, dtype, shape, None), block


def is_sent_in_place(memory: Memory, tensor: torch.Tensor, block: Block) -> bool:
    plan = plan_placement(tensor, memory.allocations)
    return plan.new_bytes == 0 and plan.allocation is not None and plan.allocation.block is block


async def test_any_kind_of_view_of_allocated_memory_is_sent_in_place(memory: Memory) -> None:
    tensor, block = await allocate(memory, 4, 6, dtype=torch.int32)
    views = [
        torch.from_numpy(tensor.numpy()[1:3]),
        tensor.detach().view(-1),
        torch.frombuffer(tensor.numpy().reshape(-1), dtype=torch.uint8),
        torch.empty(0, dtype=torch.int32).set_(tensor.untyped_storage(), 6, (6,), (1,)),
        torch.from_dlpack(tensor),  # type: ignore[attr-defined]
    ]
    del tensor
    while views:
        assert not memory.freed.items
        assert is_sent_in_place(memory, views.pop(), block)
    assert [watch.number for watch in memory.freed.items] == [block.number]


async def test_a_reused_address_is_found_as_its_new_block(memory: Memory) -> None:
    addresses = set()
    for _ in range(3):
        tensor, block = await allocate(memory, LARGE)
        addresses.add(tensor.data_ptr())
        assert is_sent_in_place(memory, tensor, block)
        del tensor
        memory.freed.collect_all()
    copied = torch.frombuffer((await memory.acquire(LARGE)).place.view(), dtype=torch.uint8)

    assert addresses == {copied.data_ptr()}, "no address was used twice: this showed nothing"
    assert plan_placement(copied, memory.allocations).allocation is None, "a copy is there now"
