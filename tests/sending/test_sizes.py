import numpy as np
import pytest
import torch

from aiotensor.errors import TooLargeError, UnsupportedTensorError
from aiotensor.sending.sizes import sizes_of


def test_a_tensor_to_allocate_has_its_sizes_and_bytes() -> None:
    assert sizes_of([2, 3], torch.bfloat16, 12) == ((2, 3), 12)


def test_a_tensor_of_a_dtype_that_cannot_be_sent_cannot_be_allocated() -> None:
    with pytest.raises(UnsupportedTensorError, match=r"torch\.quint8 cannot be sent: allocate torch\.uint8"):
        sizes_of([1], torch.quint8, 12)


def test_a_numpy_dtype_raises_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"such as torch\.uint8, got <class 'numpy\.float32'>"):
        sizes_of([1], np.float32, 12)  # type: ignore[arg-type]


def test_a_negative_size_raises_a_value_error() -> None:
    with pytest.raises(ValueError, match="negative"):
        sizes_of([2, -1], torch.uint8, 12)


def test_a_tensor_that_exceeds_the_arena_raises_the_limit() -> None:
    with pytest.raises(TooLargeError) as caught:
        sizes_of([13], torch.uint8, 12)
    assert (caught.value.limit, caught.value.requested) == (12, 13)
