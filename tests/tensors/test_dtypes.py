import pytest
import torch

from aiotensor.errors import ProtocolError
from aiotensor.tensors.dtypes import DTYPE_NAMES, DTYPES, dtype_from_name

QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
ALL = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def test_every_dtype_of_torch_travels_but_the_quantized_ones() -> None:
    assert {dtype for dtype in ALL if dtype not in DTYPE_NAMES} == QUANTIZED


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_a_dtype_is_the_same_after_the_way_over_its_name(dtype: torch.dtype) -> None:
    name = DTYPE_NAMES.get(dtype)

    assert name is not None
    assert str(dtype) == f"torch.{name}"
    assert dtype_from_name(name) is dtype


@pytest.mark.parametrize(
    "name", ["", "Tensor", "os", "load", "torch.uint8", "UINT8", "qint8", "__doc__", "float"]
)
def test_a_name_that_is_not_in_the_table_is_refused_though_torch_may_have_it(name: str) -> None:
    with pytest.raises(ProtocolError, match="unknown here"):
        dtype_from_name(name)


def test_a_very_long_name_is_not_repeated_in_full() -> None:
    with pytest.raises(ProtocolError) as caught:
        dtype_from_name("x" * 10_000)

    assert len(str(caught.value)) < 200
