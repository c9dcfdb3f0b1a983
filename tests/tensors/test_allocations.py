import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from aiotensor.tensors.allocations import Allocation, Allocations, Block
from aiotensor.tensors.dtypes import DTYPE_NAMES
from aiotensor.tensors.inline import MAX_INLINE_BYTES
from aiotensor.tensors.placement import Plan, open_tensor, plan_placement
from tests.selection import DTYPES
from tests.tensors.segments import MIB, arena_of, bytes_of, other_side_of, place_in, random_tensor


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
        self.blocks[number] = Block(number, place_in(self.arena, nbytes))
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
        opened = open_tensor("arena", where, name, tuple(view.shape), segments).tensor
        assert torch.equal(opened, view)
        opened.reshape(-1)[-1] = 5
        assert view.reshape(-1)[-1] == 5, "it is not the same memory"


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_an_allocated_tensor_of_any_dtype_is_readable_at_the_receiver(desk: Desk, dtype: torch.dtype) -> None:
    source = random_tensor((3, 5), dtype)
    tensor = desk.allocate((3, 5), dtype)
    tensor.view(-1).view(torch.uint8).copy_(source.view(-1).view(torch.uint8))
    allocation = desk.allocations.find(tensor)
    assert allocation is not None
    assert (tensor.dtype, tuple(tensor.shape), tensor.is_contiguous()) == (dtype, (3, 5), True)

    segment = allocation.block.place.segment
    segments = {segment.number: other_side_of(segment)}
    where = described(allocation, tensor)
    opened = open_tensor("arena", where, DTYPE_NAMES[dtype], (3, 5), segments)
    assert opened.tensor.dtype is dtype
    assert bytes_of(opened.tensor) == bytes_of(source)


def test_non_contiguous_views_of_allocated_memory_are_copied(desk: Desk) -> None:
    tensor = desk.allocate((4, 6), torch.complex64)
    assert is_found(desk, tensor)

    for view in (tensor.t(), tensor[:, 1:3], tensor[::2], tensor.expand(2, 4, 6)):
        assert not is_found(desk, view)
    for view in (tensor.conj(), tensor.conj().imag[:1, :1], torch._neg_view(tensor)):
        assert not is_found(desk, view)


def test_memory_that_was_not_allocated_here_is_copied(desk: Desk) -> None:
    tensor = desk.allocate((4, 6))
    other = Desk()

    assert not is_found(desk, tensor.clone())
    assert not is_found(desk, torch.zeros(3))
    assert not is_found(other, tensor)
    other.close()


def test_a_copied_block_beside_an_allocated_one_is_not_taken_for_it(desk: Desk) -> None:
    places = [place_in(desk.arena, 64) for _ in range(3)]
    allocated = desk.allocations.add(Block(7, places[1]), torch.uint8, (64,))
    desk.blocks[7] = Block(7, places[1])
    neighbours = [torch.frombuffer(place.view(), dtype=torch.uint8) for place in (places[0], places[2])]
    assert {abs(one.data_ptr() - allocated.data_ptr()) for one in neighbours} == {64}

    assert is_found(desk, allocated[63:])
    for one in neighbours:
        assert not is_found(desk, one)


def test_each_of_several_blocks_is_found_by_its_own_number(desk: Desk) -> None:
    tensors = {number: desk.allocate((1000,), number=number) for number in range(5)}

    for number, tensor in tensors.items():
        assert is_found(desk, tensor, number)
        assert is_found(desk, tensor[-1:], number)


@pytest.mark.parametrize("way", ["numpy", "numpy slice", "detached", "buffer", "storage", "dlpack"])
def test_any_kind_of_view_of_allocated_memory_is_sent_in_place(desk: Desk, way: str) -> None:
    tensor = desk.allocate((4, 6), torch.int32)
    match way:
        case "numpy":
            view = torch.from_numpy(tensor.numpy())
        case "numpy slice":
            view = torch.from_numpy(tensor.numpy()[1:3])
        case "detached":
            view = tensor.detach().view(-1)
        case "buffer":
            view = torch.frombuffer(tensor.numpy().reshape(-1), dtype=torch.uint8)
        case "storage":
            view = torch.empty(0, dtype=torch.int32).set_(tensor.untyped_storage(), 6, (6,), (1,))
        case _:
            view = torch.from_dlpack(tensor)  # type: ignore[attr-defined]
    del tensor

    assert desk.freed == []
    assert is_found(desk, view)


def test_an_empty_view_of_allocated_memory_is_sent_inline(desk: Desk) -> None:
    tensor = desk.allocate((4, 6))

    assert plan_placement(tensor[:0], desk.allocations) == Plan(0, None)


@pytest.mark.parametrize("nbytes", [1, MAX_INLINE_BYTES, MAX_INLINE_BYTES + 1])
def test_allocated_tensors_of_any_size_are_sent_in_place(desk: Desk, nbytes: int) -> None:
    plan = plan_placement(desk.allocate((nbytes,)), desk.allocations)

    assert plan.new_bytes == 0
    assert plan.allocation is not None


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


def test_a_block_that_is_freed_in_another_thread_is_reported_there(desk: Desk) -> None:
    where: list[int | None] = []
    allocations = Allocations(lambda _: where.append(threading.get_ident()))
    held = [allocations.add(Block(0, place_in(desk.arena, 64)), torch.uint8, (64,))]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()

    assert where == [thread.ident]


def test_a_block_in_a_cycle_is_reported_by_the_garbage_collector(desk: Desk) -> None:
    cycle: list[object] = [desk.allocate((64,))]
    cycle.append(cycle)
    del cycle
    gc.collect(0)

    assert desk.freed == [7]


def test_a_forgotten_block_is_not_found(desk: Desk) -> None:
    tensor = desk.allocate((64,))
    del desk.allocations.by_number[7]

    assert desk.allocations.find(tensor) is None


def test_a_reused_address_is_found_as_its_new_block(desk: Desk) -> None:
    addresses = set()
    for number in range(5):
        tensor = desk.allocate((MIB,), number=number)
        addresses.add(tensor.data_ptr())
        assert is_found(desk, tensor, number)
        del tensor
        assert desk.freed.pop() == number
        desk.take_back(number)

    assert len(addresses) == 1, "no address was used twice: this showed nothing"


def test_a_copy_at_the_address_of_a_freed_block_is_not_taken_for_it(desk: Desk) -> None:
    tensor = desk.allocate((MIB,))
    address = tensor.data_ptr()
    del tensor
    desk.take_back(7)
    place = place_in(desk.arena, MIB)
    copied = torch.frombuffer(place.view(), dtype=torch.uint8)

    assert copied.data_ptr() == address
    assert desk.allocations.find(copied) is None


def can_be_sent(desk: Desk, tensor: torch.Tensor) -> bool:
    allocation = desk.allocations.find(tensor)
    assert allocation is not None
    return allocation.can_carry(tensor)


def test_a_block_of_a_connection_that_ended_is_copied_and_stays_usable(desk: Desk) -> None:
    tensor = desk.allocate((4, 6))
    tensor.fill_(3)
    allocation = desk.allocations.find(tensor)
    assert allocation is not None
    desk.arena.retire([allocation.block.place])

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


def test_a_block_is_sent_in_place_after_the_arena_was_detached(desk: Desk) -> None:
    tensor = desk.allocate((4, 6))
    desk.arena.detach()

    assert is_found(desk, tensor)


def test_an_allocated_tensor_outlives_the_arena() -> None:
    desk = Desk()
    tensor = desk.allocate((MIB,))
    tensor.fill_(3)
    desk.close()

    assert tensor.sum() == 3 * MIB
