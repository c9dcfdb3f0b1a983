import pytest
import torch

from aiotensor.tensors.dtypes import DTYPES
from aiotensor.tensors.raw import new_tensor


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (0, 5, 2)], ids=str)
def test_a_new_tensor_is_made_without_a_warning(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = new_tensor(shape, dtype)

    assert tensor.dtype is dtype
    assert tuple(tensor.shape) == shape
    assert tensor.is_contiguous()
