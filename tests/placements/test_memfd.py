import errno
import fcntl
import gc
import multiprocessing
import os
import resource
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection, resource_tracker

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aiotensor import placements
from aiotensor.errors import ProtocolError
from aiotensor.placements import Allocations, CopyAbandonedError, Placed, new_shared, raw
from aiotensor.placements.dtypes import DTYPES
from aiotensor.placements.memfd import copy_to_memfd, open_memfd

WANTED = threading.Event()  # never set
MIB = 1 << 20


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


def is_closed(descriptor: int) -> bool:
    return str(descriptor) not in open_files()


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    tensor = placements.new_tensor(shape, dtype)
    values = np.random.default_rng(0).integers(0, 256, tensor.nbytes, np.uint8)
    tensor.reshape(-1).view(torch.uint8).copy_(torch.from_numpy(values))
    return tensor


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())


def place(source: torch.Tensor, allocations: Allocations | None = None) -> Placed:
    return placements.plan(source, allocations or Allocations(print)).place(WANTED)


@contextmanager
def lowered(limit: int, value: int) -> Iterator[None]:
    """Lower a limit of this process."""
    soft, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(limit, (soft, hard))


def next_free() -> int:
    number = os.dup(0)
    os.close(number)
    return number


# Copies


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.lists(st.integers(1, 6), max_size=4).map(tuple),
    dtype=st.sampled_from(list(DTYPES.values())),
)
def test_a_tensor_is_the_same_after_its_way_through_shared_memory(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    source = random_tensor(shape, dtype)
    payload, descriptor = copy_to_memfd(source, WANTED)
    tensor, _ = open_memfd(payload, [descriptor], dtype, shape)

    assert (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
    assert bytes_of(tensor) == bytes_of(source)


def test_a_view_ships_its_own_bytes_and_not_those_of_the_storage_under_it() -> None:
    source = random_tensor((100, 100))[3:5, 10:20].t().expand(1000, 10, 2)
    placed = place(source)

    assert placements.plan(source, Allocations(print)).new_bytes == 20_000
    assert os.fstat(placed.descriptors[0]).st_size == 20_000
    assert torch.equal(placements.open_tensor(*placed, "uint8", (1000, 10, 2)).tensor, source)


def test_a_conjugate_view_arrives_as_the_values_that_it_shows() -> None:
    source = torch.randn(100, 100, dtype=torch.complex64).conj().t()
    opened = placements.open_tensor(*place(source), "complex64", (100, 100))

    assert torch.equal(opened.tensor, source.resolve_conj())


def test_a_tensor_of_many_pieces_arrives_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw, "_PIECE_BYTES", 1000)
    source = random_tensor((123, 457)).t()
    opened = placements.open_tensor(*place(source), "uint8", (457, 123))

    assert torch.equal(opened.tensor, source)


def test_what_arrived_can_be_written_and_is_nobody_elses() -> None:
    source = random_tensor((MIB,))
    opened = placements.open_tensor(*place(source), "uint8", (MIB,))
    opened.tensor.fill_(7)

    assert torch.equal(source, random_tensor((MIB,)))


def test_memory_is_gone_with_the_last_view_of_what_arrived() -> None:
    opened = placements.open_tensor(*place(random_tensor((MIB,))), "uint8", (MIB,))
    view = opened.tensor[5:6]
    gone: list[bool] = []
    weakref.finalize(opened.owner, gone.append, True)
    del opened
    assert not gone

    del view
    assert gone


def test_a_tensor_that_arrived_holds_no_descriptor() -> None:
    before = open_files()
    opened = placements.open_tensor(*place(random_tensor((MIB,))), "uint8", (MIB,))
    held = open_files() - before
    del opened

    assert not held


class SetAfter(threading.Event):
    """An event that is found set when it was looked at so many times before."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.looks = looks

    def is_set(self) -> bool:
        self.looks -= 1
        return self.looks < 0


@pytest.mark.parametrize("looks", [0, 1, 5])
def test_a_copy_that_nobody_wants_any_more_stops_and_leaves_nothing_behind(
    looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw, "_PIECE_BYTES", MIB)
    abandoned = SetAfter(looks)

    with pytest.raises(CopyAbandonedError):
        placements.plan(random_tensor((10, MIB)), Allocations(print)).place(abandoned)
    assert abandoned.looks == -1, "it went on"


def show_and_change(end: connection.Connection) -> None:
    """In a child: open the tensor that arrives, tell its bytes, change one, and wait for the end."""
    with socket.socket(fileno=os.dup(end.fileno())) as sock:
        payload, descriptors, _, _ = socket.recv_fds(sock, 1 << 16, 4)
        tensor, _owner = open_memfd(payload, descriptors, torch.int32, (2, 3))
        sock.send(bytes_of(tensor))
        tensor[1, 2] = -5
        sock.send(b"changed")
        sock.recv(1)


def test_another_process_opens_the_same_memory() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    far_end = connection.Connection(theirs.detach())
    process = multiprocessing.get_context("spawn").Process(target=show_and_change, args=(far_end,))
    allocations = Allocations(lambda _: None)
    tensor = allocations.add(new_shared(24), 0, torch.int32, (2, 3))
    tensor.copy_(torch.arange(6).reshape(2, 3))
    with ours:
        process.start()
        far_end.close()
        placed = place(tensor, allocations)
        socket.send_fds(ours, [placed.payload], placed.descriptors)
        os.close(placed.descriptors[0])

        assert ours.recv(100) == np.arange(6, dtype=np.int32).tobytes()
        assert ours.recv(100) == b"changed"
        assert tensor.tolist() == [[0, 1, 2], [3, 4, -5]]
    process.join()
    assert process.exitcode == 0
    process.close()


# A machine that is short of something


def test_a_copy_for_which_there_is_no_room_says_so_and_leaves_nothing_behind() -> None:
    with lowered(resource.RLIMIT_FSIZE, MIB), pytest.raises(OSError, match="File too large"):
        place(random_tensor((2, MIB)))


def test_a_block_for_which_there_is_no_room_says_so_and_leaves_nothing_behind() -> None:
    with lowered(resource.RLIMIT_FSIZE, MIB), pytest.raises(OSError, match="File too large"):
        new_shared(2 * MIB)


@pytest.mark.parametrize("spare", [0, 1])
def test_a_block_for_which_there_is_no_descriptor_says_so(spare: int) -> None:
    with lowered(resource.RLIMIT_NOFILE, next_free() + spare), pytest.raises(OSError) as caught:  # noqa: PT011
        new_shared(MIB)

    assert caught.value.errno in (errno.EMFILE, errno.ENOMEM, errno.ENOSPC)


def test_a_tensor_whose_descriptor_did_not_arrive_is_no_offence_but_a_lack() -> None:
    placed = place(random_tensor((MIB,)))
    os.close(placed.descriptors[0])

    with pytest.raises(OSError, match="ulimit -n") as caught:
        placements.open_tensor(placed.placement, placed.payload, [], "uint8", (MIB,))
    assert caught.value.errno == errno.EMFILE


def test_a_tensor_that_cannot_be_mapped_is_no_offence_but_a_lack_and_leaves_no_descriptor_open() -> None:
    descriptor = sealed_memfd(1 << 46)  # all the room of addresses that a process has is twice as large
    again = os.dup(descriptor)
    first = placements.open_tensor("memfd", at(0), [descriptor], "uint8", (1,))
    before = open_files() - {str(again)}

    with pytest.raises(OSError, match="Cannot allocate memory"):
        placements.open_tensor("memfd", at(0), [again], "uint8", (1,))
    left = open_files() - before
    for file in left:
        os.close(int(file))
    del first

    assert not left


def test_a_failure_of_torch_is_told_as_one_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("unable to open file: Too many open files (24)")

    monkeypatch.setattr(torch, "from_file", fail)
    with pytest.raises(OSError, match="cannot be mapped: unable to open file") as caught:
        new_shared(MIB)
    assert caught.value.errno == errno.ENOMEM


# What a broken peer may say


def at(offset: object) -> bytes:
    return msgspec.msgpack.encode([offset])


def sealed_memfd(nbytes: int, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    descriptor = os.memfd_create("of a peer", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


@pytest.mark.parametrize(
    ("offset", "shape"),
    [
        (4, (4,)),
        (2, (2,)),
        (16, (1,)),
        (20, (0,)),
        (0, (0,)),
        (2**62, (1,)),
        (0, (5,)),
        (0, (2**50,)),
        (8, (2, 2)),
    ],
    ids=str,
)
def test_a_tensor_outside_its_block_or_off_its_grid_is_refused(offset: int, shape: tuple[int, ...]) -> None:
    descriptors = [sealed_memfd(16), sealed_memfd(1)]

    with pytest.raises(ProtocolError, match=f"at byte {offset} of a block of 16 bytes"):
        placements.open_tensor("memfd", at(offset), descriptors, "float32", shape)
    assert all(map(is_closed, descriptors))


def test_a_tensor_one_byte_too_long_is_refused() -> None:
    with pytest.raises(ProtocolError, match="17 bytes at byte 0 of a block of 16 bytes"):
        placements.open_tensor("memfd", at(0), [sealed_memfd(16)], "uint8", (17,))


def test_a_tensor_that_fills_the_end_of_its_block_is_opened() -> None:
    opened = placements.open_tensor("memfd", at(8), [sealed_memfd(16)], "float32", (2,))

    assert opened.tensor.tolist() == [0, 0]


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"\x90", at(-1), at(None), at("0"), at(0.0), at(2**64 - 1), msgspec.msgpack.encode(0)],
    ids=repr,
)
def test_a_payload_that_says_nothing_is_refused(payload: bytes) -> None:
    descriptor = sealed_memfd(16)

    with pytest.raises(ProtocolError):
        placements.open_tensor("memfd", payload, [descriptor], "uint8", (1,))
    assert is_closed(descriptor)


@pytest.mark.parametrize("dtype", ["", "qint8", "Tensor"])
def test_a_block_of_an_unknown_dtype_is_not_opened(dtype: str) -> None:
    descriptor = sealed_memfd(16)

    with pytest.raises(ProtocolError, match="unknown here"):
        placements.open_tensor("memfd", at(0), [descriptor], dtype, (1,))
    assert is_closed(descriptor)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL])
def test_memory_that_could_shrink_while_it_is_read_is_refused(seals: int) -> None:
    descriptor = sealed_memfd(16, seals)

    with pytest.raises(ProtocolError, match="could shrink"):
        placements.open_tensor("memfd", at(0), [descriptor], "uint8", (1,))
    assert is_closed(descriptor)


def test_what_is_no_memory_at_all_is_refused() -> None:
    reading_end, writing_end = os.pipe()
    null, this_file = os.open(os.devnull, os.O_RDONLY), os.open(__file__, os.O_RDONLY)

    for descriptor in (reading_end, writing_end, null, this_file):
        with pytest.raises(ProtocolError):
            placements.open_tensor("memfd", at(0), [descriptor], "uint8", (1,))
        assert is_closed(descriptor)


@pytest.mark.parametrize("kind", ["copied", "allocated"])
def test_nobody_can_change_the_size_of_what_was_sent(kind: str) -> None:
    allocations = Allocations(lambda _: None)
    source = random_tensor((MIB,))
    if kind == "allocated":
        source = allocations.add(new_shared(MIB), 0, torch.uint8, (MIB,))
    [descriptor] = place(source, allocations).descriptors

    for size in (0, MIB - 1, MIB + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    assert os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:"), "it has a name"
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)
