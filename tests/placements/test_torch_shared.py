import errno
import gc
import multiprocessing
import os
import pickle
import resource
import socket
import threading
from collections.abc import Iterator
from multiprocessing import connection, resource_tracker
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aiotensor import placements
from aiotensor.errors import ProtocolError
from aiotensor.placements import Allocations, CopyAbandonedError, descriptors
from aiotensor.placements.dtypes import DTYPES
from aiotensor.placements.torch_shared import copy_to_shared, name_shared, new_shared, open_shared

WANTED = threading.Event()  # never set
MIB = 1 << 20
SHARED_FILES = Path("/dev/shm")  # noqa: S108 - looked into, never written to


def open_files() -> set[str]:
    # But for the one that lists them.
    return {name for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")}


@pytest.fixture(autouse=True)
def no_descriptor_is_left_open() -> Iterator[None]:
    resource_tracker.ensure_running()  # else the first spawn would, and keep a pipe to it
    before = open_files()
    yield
    if open_files() != before:
        gc.collect()  # slow, and seldom needed
    assert open_files() == before


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    tensor = placements.new_tensor(shape, dtype)
    raw = np.random.default_rng(0).integers(0, 256, tensor.nbytes, np.uint8)
    tensor.reshape(-1).view(torch.uint8).copy_(torch.from_numpy(raw))
    return tensor


def tensor_over(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.lists(st.integers(1, 6), max_size=4).map(tuple),
    dtype=st.sampled_from(list(DTYPES.values())),
)
def test_a_tensor_is_the_same_after_its_way_through_shared_memory(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    source = random_tensor(shape, dtype)
    _storage, target = copy_to_shared(source, WANTED)
    tensor, owner = open_shared(*name_shared(target), dtype, shape)

    assert (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
    assert bytes_of(tensor) == bytes_of(source)
    assert tensor.untyped_storage() is owner


def test_a_view_ships_its_own_bytes_and_not_those_of_the_storage_under_it() -> None:
    source = random_tensor((100, 100))[3:5, 10:20].t()
    plan = placements.plan(source.expand(1000, 10, 2), Allocations(print))
    placed = plan.place(WANTED)
    opened = placements.open_tensor(*placed, "uint8", (1000, 10, 2))

    assert plan.new_bytes == 20_000
    assert isinstance(opened.owner, torch.UntypedStorage)
    assert opened.owner.nbytes() == 20_000
    assert torch.equal(opened.tensor, source.expand(1000, 10, 2))


def test_the_memory_lives_on_its_way_when_nothing_but_the_descriptor_holds_it() -> None:
    source = random_tensor((MIB,))
    placed = placements.plan(source, Allocations(print)).place(WANTED)

    assert torch.equal(placements.open_tensor(*placed, "uint8", (MIB,)).tensor, source)


def test_a_copy_that_nobody_wants_any_more_leaves_nothing_behind() -> None:
    abandoned = threading.Event()
    abandoned.set()

    with pytest.raises(CopyAbandonedError):
        placements.plan(random_tensor((MIB,)), Allocations(print)).place(abandoned)


@pytest.fixture
def little_room() -> Iterator[None]:
    """Let this process make no file larger than 1 MiB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("little_room")
def test_a_block_for_which_there_is_no_room_says_so_and_leaves_nothing_behind() -> None:
    files = open_files()
    with pytest.raises(OSError, match="lower arena_bytes") as caught:
        new_shared(2 * MIB)
    left = open_files() - files
    left_names = list(SHARED_FILES.glob(f"*_{os.getpid()}_*"))
    for file in left:
        os.close(int(file))
    for name in left_names:
        name.unlink()

    assert caught.value.errno == errno.ENOSPC
    assert not left, "descriptors left behind"
    assert not left_names, "files left behind"


def test_a_block_has_no_name_in_the_file_system_that_a_killed_process_could_leave_behind() -> None:
    _, [number] = descriptors.dumps(new_shared(MIB))
    what = os.readlink(f"/proc/self/fd/{number}")
    os.close(number)

    assert what.startswith("/memfd:")


def show_and_change(end: connection.Connection) -> None:
    """In a child: open the tensor that arrives, tell its bytes, change one, and wait for the end."""
    with socket.socket(fileno=os.dup(end.fileno())) as sock:
        payload, numbers, _, _ = socket.recv_fds(sock, 1 << 16, 4)
        tensor, _owner = open_shared(payload, numbers, torch.int32, (2, 3))
        sock.send(bytes_of(tensor))
        tensor[1, 2] = -5
        sock.send(b"changed")
        sock.recv(1)


def test_another_process_opens_the_same_memory() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    far_end = connection.Connection(theirs.detach())
    process = multiprocessing.get_context("spawn").Process(target=show_and_change, args=(far_end,))
    with ours:
        process.start()
        far_end.close()
        source = torch.arange(6, dtype=torch.int32).reshape(2, 3)
        _storage, target = copy_to_shared(source, WANTED)
        payload, numbers = name_shared(target)
        socket.send_fds(ours, [payload], numbers)
        descriptors.close(numbers)

        assert ours.recv(100) == bytes_of(source)
        assert ours.recv(100) == b"changed"
        assert target.tolist() == [[0, 1, 2], [3, 4, -5]]
    process.join()
    assert process.exitcode == 0
    process.close()


# What a broken peer may say


def described(pickled: bytes, offset: object = 0) -> bytes:
    return msgspec.msgpack.encode([pickled, offset])


def named_block(nbytes: int, offset: object) -> tuple[bytes, list[int]]:
    """Name a block as a peer would that lies about the offset."""
    payload, numbers = name_shared(tensor_over(new_shared(nbytes)))
    pickled, _ = msgspec.msgpack.decode(payload)
    return described(pickled, offset), numbers


@pytest.mark.parametrize(
    ("offset", "shape"),
    [(4, (4,)), (-4, (2,)), (2, (2,)), (20, (0,)), (2**62, (1,)), (0, (5,)), (0, (2**50,)), (8, (2, 2))],
    ids=str,
)
def test_a_tensor_outside_its_block_or_off_its_grid_is_refused(offset: int, shape: tuple[int, ...]) -> None:
    payload, numbers = named_block(16, offset)

    with pytest.raises(ProtocolError, match=f"at byte {offset} of a block of 16 bytes"):
        placements.open_tensor("shared", payload, numbers, "float32", shape)


def test_a_tensor_that_fills_the_end_of_its_block_is_opened() -> None:
    payload, numbers = named_block(16, 8)

    assert placements.open_tensor("shared", payload, numbers, "float32", (2,)).tensor.shape == (2,)


def value_of_another_kind() -> bytes:
    return pickle.dumps(torch.Size([1]))


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "cannot be read"),
        (b"\xc1", "cannot be read"),
        (described(b"", "text"), "cannot be read"),
        (described(b"", 2**64 - 1), "cannot be opened"),
        (described(b""), "cannot be opened"),
        (described(b"no pickle"), "cannot be opened"),
        (described(b"cnowhere\nnothing\n."), "cannot be opened"),
        (described(b"caiotensor\nnothing\n."), "cannot be opened"),
        (described(pickle.dumps(5)), "named a int where shared memory belongs"),
        (described(value_of_another_kind()), "named a Size where shared memory belongs"),
    ],
    ids=repr,
)
def test_a_payload_that_names_no_block_is_refused_and_its_descriptors_are_closed(
    payload: bytes, reason: str
) -> None:
    numbers = [os.open(os.devnull, os.O_RDONLY) for _ in range(2)]

    with pytest.raises(ProtocolError, match=reason):
        placements.open_tensor("shared", payload, numbers, "uint8", (1,))
    for number in numbers:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)


@pytest.mark.parametrize("dtype", ["", "qint8", "Tensor"])
def test_a_block_of_an_unknown_dtype_is_not_opened(dtype: str) -> None:
    payload, numbers = named_block(16, 0)

    with pytest.raises(ProtocolError, match="unknown here"):
        placements.open_tensor("shared", payload, numbers, dtype, (1,))


def test_a_block_whose_descriptor_did_not_arrive_is_no_offence_but_a_lack() -> None:
    payload, numbers = named_block(16, 0)
    descriptors.close(numbers)

    with pytest.raises(OSError, match="ulimit -n") as caught:
        placements.open_tensor("shared", payload, [], "uint8", (1,))
    assert caught.value.errno == errno.EMFILE


def test_a_descriptor_that_cannot_be_mapped_is_no_offence_but_a_lack() -> None:
    payload, numbers = named_block(16, 0)
    descriptors.close(numbers)
    reading_end, writing_end = os.pipe()
    os.close(writing_end)
    before = open_files()

    with pytest.raises(OSError, match="cannot map shared memory") as caught:
        placements.open_tensor("shared", payload, [reading_end], "uint8", (1,))
    assert caught.value.errno == errno.ENOMEM
    assert str(reading_end) not in open_files()
    for file in open_files() - before:
        os.close(int(file))  # torch's own duplicate, which it forgets when mapping fails


# Blocks that callers allocated


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

    for view in (tensor, tensor[1:3], tensor[2], tensor[0, 0], tensor.reshape(-1), tensor.view(torch.int32)):
        plan = placements.plan(view, freed.allocations)
        assert (plan.new_bytes, plan.block) == (0, 7)
        opened = placements.open_tensor(*plan.place(WANTED), str(view.dtype)[6:], tuple(view.shape))
        assert opened.tensor.data_ptr() == view.data_ptr()
        assert bytes_of(opened.tensor) == bytes_of(view)


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
    where: list[int] = []
    allocations = Allocations(lambda _: where.append(threading.get_ident()))
    boxes = [[allocations.add(new_shared(64), 0, torch.uint8, (64,))]]
    thread = threading.Thread(target=lambda: boxes[0].clear())
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
    others = [tensor_over(new_shared(MIB)) for _ in range(3)]

    assert any(other.data_ptr() == address for other in others), "it was not used again: this showed nothing"
    assert [freed.allocations.find(other) for other in others] == [None] * 3


def test_a_late_word_of_an_old_block_leaves_the_new_one_at_its_address_known() -> None:
    freed = Freed()
    tensor = freed.allocate((64,), block=2)
    freed.allocations._freed(tensor.data_ptr(), 1)

    assert freed.blocks == [1]
    assert freed.allocations.find(tensor) == 2
