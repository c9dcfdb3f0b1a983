import threading

import numpy as np
import torch

from aiotensor import placements
from aiotensor.placements import Allocations, new_shared

WANTED = threading.Event()  # never set
MIB = 1 << 20


class Freed:
    """Collect the numbers of the blocks that were freed."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.allocations = Allocations(self.blocks.append)

    def allocate(
        self, shape: tuple[int, ...], dtype: torch.dtype = torch.uint8, block: int = 7
    ) -> torch.Tensor:
        nbytes = int(np.prod(shape)) * dtype.itemsize
        return self.allocations.add(new_shared(nbytes), block, dtype, shape)


def test_an_allocated_tensor_and_its_contiguous_views_are_sent_where_they_lie() -> None:
    freed = Freed()
    tensor = freed.allocate((4, 6), torch.float32)
    tensor.copy_(torch.arange(24.0).reshape(4, 6))

    for view in (tensor, tensor[1:3], tensor[2], tensor[3, 5], tensor.reshape(-1), tensor.view(torch.int32)):
        plan = placements.plan(view, freed.allocations)
        assert (plan.new_bytes, plan.block, plan.is_quick) == (0, 7, True)
        opened = placements.open_tensor(*plan.place(WANTED), str(view.dtype)[6:], tuple(view.shape)).tensor
        assert torch.equal(opened, view)
        opened.reshape(-1)[-1] = 5
        assert view.reshape(-1)[-1] == 5, "it is not the same memory"


def test_what_is_not_contiguous_in_allocated_memory_is_copied() -> None:
    freed = Freed()
    tensor = freed.allocate((4, 6), torch.complex64)

    for view in (tensor.t(), tensor[:, 1:3], tensor[::2], tensor.expand(2, 4, 6)):
        assert freed.allocations.find(view) is None
    for view in (tensor.conj(), tensor.conj().imag[:1, :1], torch._neg_view(tensor)):
        assert freed.allocations.find(view) is None


def test_memory_that_nobody_allocated_here_is_copied() -> None:
    freed = Freed()
    tensor = freed.allocate((4, 6))

    assert freed.allocations.find(tensor.clone()) is None
    assert freed.allocations.find(torch.zeros(3)) is None
    assert Freed().allocations.find(tensor) is None


def test_another_storage_over_allocated_memory_is_copied() -> None:
    freed = Freed()
    tensor = freed.allocate((4, 6))

    assert freed.allocations.find(torch.from_numpy(tensor.numpy())) is None


def test_an_empty_view_of_allocated_memory_travels_in_the_frame() -> None:
    freed = Freed()
    plan = placements.plan(freed.allocate((4, 6))[:0], freed.allocations)

    assert (plan.new_bytes, plan.block) == (0, None)
    assert plan.place(WANTED).placement == "inline"


def test_a_block_is_freed_once_when_the_last_view_of_it_is_gone() -> None:
    freed = Freed()
    tensor = freed.allocate((4, 6))
    view = tensor[1:2]
    array = tensor.numpy()
    del tensor
    assert freed.blocks == []
    assert freed.allocations.find(view) == 7

    del view
    assert freed.blocks == []

    del array
    assert freed.blocks == [7]


def test_a_block_that_is_freed_in_another_thread_is_reported_there() -> None:
    where: list[int | None] = []
    allocations = Allocations(lambda _: where.append(threading.get_ident()))
    held = [allocations.add(new_shared(64), 0, torch.uint8, (64,))]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()

    assert where == [thread.ident]


def test_a_new_block_at_an_old_address_is_the_new_block() -> None:
    freed = Freed()
    addresses = []
    for block in range(20):
        tensor = freed.allocate((MIB,), block=block)
        addresses.append(tensor.data_ptr())
        assert freed.allocations.find(tensor) == block
        del tensor

    assert freed.blocks == list(range(20))
    assert len(set(addresses)) < 20, "no address was used twice: this showed nothing"


def test_memory_of_others_at_the_address_of_a_freed_block_is_copied() -> None:
    freed = Freed()
    tensor = freed.allocate((MIB,))
    address = tensor.data_ptr()
    del tensor
    others = [torch.empty(0, dtype=torch.uint8).set_(new_shared(MIB).storage) for _ in range(3)]

    assert any(other.data_ptr() == address for other in others), "it was not used again: this showed nothing"
    assert [freed.allocations.find(other) for other in others] == [None] * 3


def test_a_late_word_of_an_old_block_leaves_the_new_one_at_its_address_known() -> None:
    freed = Freed()
    tensor = freed.allocate((64,), block=2)
    freed.allocations._freed(tensor.data_ptr(), 1)

    assert freed.blocks == [1]
    assert freed.allocations.find(tensor) == 2
