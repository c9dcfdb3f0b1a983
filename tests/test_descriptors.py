import os

import pytest

from aiotensor.descriptors import close_all


def test_all_descriptors_are_closed() -> None:
    numbers = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
    close_all(numbers)

    for number in numbers:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)
