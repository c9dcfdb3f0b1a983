import errno
import os
import pickle
import socket
from collections.abc import Iterator
from multiprocessing import context, reduction
from typing import Protocol

import pytest
import torch

from aiotensor.placements import descriptors
from aiotensor.placements.descriptors import dumps, loads


def count_open() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def no_descriptor_is_left_open() -> Iterator[None]:
    before = count_open()
    yield
    assert count_open() == before


class Detachable(Protocol):
    """What `reduction.DupFd` returns."""

    def detach(self) -> int: ...


class Holder:
    """Holds a descriptor, and travels as what holds its duplicate."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[object, ...]:
        return Holder._rebuild, (reduction.DupFd(self.number),)

    @staticmethod
    def _rebuild(duplicate: Detachable) -> "Holder":
        return Holder(duplicate.detach())


class Twice(Holder):
    """Asks for its one descriptor two times."""

    def __reduce__(self) -> tuple[object, ...]:
        return Twice._rebuild_twice, (reduction.DupFd(self.number),)

    @staticmethod
    def _rebuild_twice(duplicate: Detachable) -> "Twice":
        first = duplicate.detach()
        try:
            return Twice(duplicate.detach())
        finally:
            os.close(first)


class Unpicklable:
    def __reduce__(self) -> tuple[object, ...]:
        raise pickle.PicklingError("no way")


def test_the_value_that_comes_back_has_a_duplicate_of_the_same_file() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        data, numbers = dumps(Holder(theirs.fileno()))
        value = loads(data, numbers)
        assert isinstance(value, Holder)
        with socket.socket(fileno=value.number) as duplicate:
            duplicate.send(b"through the duplicate")
            assert ours.recv(100) == b"through the duplicate"


def test_each_of_several_descriptors_finds_its_place() -> None:
    pairs = [socket.socketpair() for _ in range(3)]
    data, numbers = dumps([Holder(theirs.fileno()) for _, theirs in pairs])
    assert len(numbers) == 3
    holders = loads(data, numbers)

    assert isinstance(holders, list)
    for index, (holder, (ours, theirs)) in enumerate(zip(holders, pairs, strict=True)):
        with ours, theirs, socket.socket(fileno=holder.number) as duplicate:
            duplicate.send(bytes([index]))
            assert ours.recv(1) == bytes([index])


def test_a_storage_travels_by_its_descriptor_alone() -> None:
    storage = torch.UntypedStorage._new_shared(1 << 20)  # type: ignore[no-untyped-call]
    data, numbers = dumps(storage)

    assert len(data) < 1000
    assert len(numbers) == 1
    again = loads(data, numbers)
    assert isinstance(again, torch.UntypedStorage)
    assert again.data_ptr() == storage.data_ptr()


def test_what_is_around_the_pickle_sees_no_spawn_afterwards() -> None:
    dumps(3)
    assert context.get_spawning_popen() is None

    with pytest.raises(pickle.PicklingError):
        dumps(Unpicklable())
    assert context.get_spawning_popen() is None


def test_a_value_that_cannot_be_pickled_leaves_no_duplicate_behind() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        before = count_open()
        with pytest.raises(pickle.PicklingError, match="no way"):
            dumps([Holder(ours.fileno()), Holder(theirs.fileno()), Unpicklable()])
        assert count_open() == before


def test_descriptors_that_the_value_does_not_take_are_closed() -> None:
    numbers = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]

    assert loads(pickle.dumps("a value without any"), numbers) == "a value without any"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(numbers[0])


def test_bytes_that_are_no_pickle_close_the_descriptors_beside_them() -> None:
    number = os.open(os.devnull, os.O_RDONLY)
    with pytest.raises(pickle.UnpicklingError):
        loads(b"no pickle", [number])

    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_a_descriptor_that_did_not_arrive_is_told_as_a_lack_of_descriptors() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        data, numbers = dumps([Holder(ours.fileno()), Holder(theirs.fileno())])
    descriptors.close(numbers)

    with pytest.raises(OSError, match="ulimit -n") as caught:
        loads(data, [])
    assert caught.value.errno == errno.EMFILE


def test_a_descriptor_cannot_be_taken_twice() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        data, numbers = dumps(Twice(ours.fileno()))
    with pytest.raises(pickle.UnpicklingError, match="descriptor 0 is named twice"):
        loads(data, numbers)


def test_a_value_can_be_opened_after_one_that_failed() -> None:
    with pytest.raises(pickle.UnpicklingError):
        loads(b"no pickle", [])

    assert loads(pickle.dumps(5), []) == 5
