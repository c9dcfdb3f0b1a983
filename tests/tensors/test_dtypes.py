import pytest
import torch

from aiotensor.errors import ProtocolError
from aiotensor.tensors.dtypes import DTYPE_NAMES, DTYPES, dtype_from_name

QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
ALL = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def test_every_dtype_except_quantized_ones_can_be_sent() -> None:
    assert {dtype for dtype in ALL if dtype not in DTYPE_NAMES} == QUANTIZED


def test_a_dtype_survives_the_conversion_to_its_name() -> None:
    for dtype in DTYPES.values():
        name = DTYPE_NAMES[dtype]
        assert str(dtype) == f"torch.{name}"
        assert dtype_from_name(name) is dtype


def test_a_dtype_name_outside_the_table_is_refused() -> None:
    for name in ("", "Tensor", "os", "load", "torch.uint8", "UINT8", "qint8", "__doc__", "float"):
        with pytest.raises(ProtocolError, match="of unknown dtype"):
            dtype_from_name(name)


def test_a_very_long_name_is_not_repeated_in_full() -> None:
    with pytest.raises(ProtocolError) as caught:
        dtype_from_name("x" * 10_000)

    assert len(str(caught.value)) < 200
