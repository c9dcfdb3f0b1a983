import zlib

import numpy as np
import pytest

from demo import fingerprint as module
from demo.fingerprint import fingerprint
from demo.messages import Fingerprint


@pytest.mark.parametrize("stride", [1, 7, 1 << 24])
def test_the_checksum_is_of_all_bytes_in_order(stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STRIDE", stride)
    array = np.arange(60, dtype=np.float64).reshape(3, 4, 5)

    assert fingerprint(array) == Fingerprint("float64", (3, 4, 5), zlib.crc32(array.tobytes()))


def test_a_view_has_the_fingerprint_of_its_copy() -> None:
    view = np.arange(60, dtype=np.uint8).reshape(6, 10)[::2, ::-3]

    assert fingerprint(view) == fingerprint(view.copy())


def test_an_empty_array_has_a_fingerprint() -> None:
    assert fingerprint(np.empty((0, 4), np.uint8)) == Fingerprint("uint8", (0, 4), 0)


def test_one_changed_bit_changes_the_fingerprint() -> None:
    array = np.zeros((4, 4), np.uint8)
    before = fingerprint(array)
    array[3, 3] = 1

    assert fingerprint(array) != before


def test_another_shape_or_dtype_changes_the_fingerprint() -> None:
    array = np.zeros((2, 8), np.uint8)

    assert len({fingerprint(a) for a in (array, array.reshape(8, 2), array.view(np.int8))}) == 3
