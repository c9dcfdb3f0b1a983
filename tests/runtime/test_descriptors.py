import os

import pytest

from aiotensor.runtime.descriptors import Descriptor, ForeignDescriptor, close_after_fork, close_all
from tests.runtime.test_affinity import forks, in_a_fork


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def test_all_descriptors_are_closed_even_if_closing_one_fails() -> None:
    numbers = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
    os.close(numbers[1])
    with pytest.raises(OSError, match="Bad file descriptor"):
        close_all(numbers)

    assert not any(map(is_open, numbers))


class Unclosable:
    def close(self) -> None:
        raise OSError("it cannot be closed")


@forks
def test_a_forked_child_closes_all_descriptors_even_if_closing_some_fails() -> None:
    # In between, since they are closed in any order.
    unclosable, descriptors = [], []
    for _ in range(10):
        unclosable.append(Unclosable())
        descriptors.append(Descriptor(os.open(os.devnull, os.O_RDONLY)))
    for one in unclosable:
        close_after_fork(one)
    numbers = [one.number for one in descriptors]

    def tell() -> None:
        raise RuntimeError([number for number in numbers if is_open(number)])

    try:
        assert in_a_fork(tell) == "RuntimeError: []"
        assert all(map(is_open, numbers))
    finally:
        for descriptor in descriptors:
            descriptor.close()


def test_a_foreign_descriptor_closes_only_the_file_it_was_created_for() -> None:
    reader, writer = os.pipe()
    kept = ForeignDescriptor(reader)
    os.close(reader)
    again = os.open("/dev/null", os.O_RDONLY)
    assert again == reader
    kept.close()
    os.fstat(again)  # it is open still

    ForeignDescriptor(again).close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(again)
    os.close(writer)
