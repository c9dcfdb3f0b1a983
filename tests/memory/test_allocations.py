from collections.abc import Iterator

import numpy as np
import pytest
import torch

from aiotensor.memory.allocations import Allocation, Allocations
from aiotensor.memory.arena import Block, Extent
from aiotensor.memory.dtypes import DTYPE_NAMES
from aiotensor.memory.placement import plan_placement
from aiotensor.protocol.credits import Ticket
from tests.memory.segments import MIB, arena_of, open_tensor, other_side_of, place_in


def block_at(number: int, place: Extent) -> Block:
    return Block(number, place=place, ticket=Ticket(place.nbytes, None, 0.0, granted=True, place=place))


class Desk:
    """Allocate from an arena, and collect the numbers of the blocks that were freed."""

    def __init__(self) -> None:
        self.freed = freed = list[int]()
        self.allocations = Allocations(lambda watch: freed.append(watch.number))
        self._context = arena_of(8 * MIB)
        self.arena = self._context.__enter__()
        self.blocks: dict[int, Block] = {}

    def close(self) -> None:
        self._context.__exit__(None, None, None)

    def allocate(
        self, shape: tuple[int, ...], dtype: torch.dtype = torch.uint8, number: int = 7
    ) -> torch.Tensor:
        nbytes = int(np.prod(shape)) * dtype.itemsize
        self.blocks[number] = block_at(number, place_in(self.arena, nbytes))
        return self.allocations.add(self.blocks[number], dtype, shape)

    def take_back(self, number: int) -> None:
        """Free a block as the sender does."""
        del self.allocations.by_number[number]
        self.arena.free(self.blocks.pop(number).place)


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.close()


def described(allocation: Allocation, tensor: torch.Tensor) -> bytes:
    """Return the position of a tensor as its frame states it."""
    return allocation.block.place.describe(tensor.data_ptr() - allocation.start)


def is_found(desk: Desk, tensor: torch.Tensor, number: int = 7) -> bool:
    allocation = desk.allocations.find(tensor)
    assert allocation is None or allocation.block == desk.blocks[number]
    return allocation is not None and allocation.can_carry(tensor)


def test_an_allocated_tensor_and_its_contiguous_views_are_sent_in_place(desk: Desk) -> None:
    desk.allocate((100,), number=6)  # so that the offsets differ
    tensor = desk.allocate((4, 6), torch.float32)
    tensor.copy_(torch.arange(24.0).reshape(4, 6))
    segment = desk.blocks[7].place.segment
    segments = {segment.number: other_side_of(segment)}

    for view in (tensor, tensor[1:3], tensor[2], tensor[3, 5], tensor.reshape(-1), tensor.view(torch.int32)):
        plan = plan_placement(view, desk.allocations)
        assert plan.new_bytes == 0
        assert plan.allocation is not None
        assert plan.allocation.block == desk.blocks[7]
        name = DTYPE_NAMES[view.dtype]
        where = described(plan.allocation, view)
        opened = open_tensor("arena", where, name, tuple(view.shape), segments)
        assert torch.equal(opened, view)
        opened.reshape(-1)[-1] = 5
        assert view.reshape(-1)[-1] == 5, "it is not the same memory"


def test_a_copied_block_beside_an_allocated_one_is_not_taken_for_it(desk: Desk) -> None:
    places = [place_in(desk.arena, 64) for _ in range(3)]
    desk.blocks[7] = block_at(7, places[1])
    allocated = desk.allocations.add(desk.blocks[7], torch.uint8, (64,))
    neighbours = [torch.frombuffer(place.view(), dtype=torch.uint8) for place in (places[0], places[2])]
    assert {abs(one.data_ptr() - allocated.data_ptr()) for one in neighbours} == {64}

    assert is_found(desk, allocated[63:])
    for one in neighbours:
        assert not is_found(desk, one)


def test_any_kind_of_view_of_allocated_memory_is_sent_in_place(desk: Desk) -> None:
    tensor = desk.allocate((4, 6), torch.int32)
    views = [
        torch.from_numpy(tensor.numpy()[1:3]),
        tensor.detach().view(-1),
        torch.frombuffer(tensor.numpy().reshape(-1), dtype=torch.uint8),
        torch.empty(0, dtype=torch.int32).set_(tensor.untyped_storage(), 6, (6,), (1,)),
        torch.from_dlpack(tensor),  # type: ignore[attr-defined]
    ]
    del tensor
    while views:
        assert desk.freed == []
        assert is_found(desk, views.pop())
    assert desk.freed == [7]


def test_a_block_is_freed_once_when_the_last_view_of_it_is_gone(desk: Desk) -> None:
    tensor = desk.allocate((4, 6))
    view = tensor[1:2]
    array = tensor.numpy()
    del tensor
    assert desk.freed == []
    assert is_found(desk, view)

    del view
    assert desk.freed == []

    del array
    assert desk.freed == [7]


def test_a_reused_address_is_found_as_its_new_block(desk: Desk) -> None:
    addresses = set()
    for number in range(3):
        tensor = desk.allocate((MIB,), number=number)
        addresses.add(tensor.data_ptr())
        assert is_found(desk, tensor, number)
        del tensor
        assert desk.freed.pop() == number
        desk.take_back(number)
    copied = torch.frombuffer(place_in(desk.arena, MIB).view(), dtype=torch.uint8)

    assert addresses == {copied.data_ptr()}, "no address was used twice: this showed nothing"
    assert desk.allocations.find(copied) is None, "a copy is there now"


def can_be_sent(desk: Desk, tensor: torch.Tensor) -> bool:
    allocation = desk.allocations.find(tensor)
    assert allocation is not None
    return allocation.can_carry(tensor)


def test_a_block_of_a_connection_that_ended_is_copied_and_stays_usable(desk: Desk) -> None:
    tensor = desk.allocate((4, 6))
    tensor.fill_(3)
    allocation = desk.allocations.find(tensor)
    assert allocation is not None
    desk.arena.retire(allocation.block.place.segment)

    assert not can_be_sent(desk, tensor)
    assert tensor.tolist() == [[3] * 6] * 4
    newer = desk.allocate((4, 6), number=8)
    assert is_found(desk, newer, 8)
    assert can_be_sent(desk, newer)
    tensor = tensor[:1]
    assert not can_be_sent(desk, tensor)
    del tensor
    assert desk.freed == [7]
    desk.take_back(7)


def test_an_allocated_tensor_outlives_the_arena() -> None:
    desk = Desk()
    tensor = desk.allocate((MIB,))
    tensor.fill_(3)
    desk.close()

    assert tensor.sum() == 3 * MIB
