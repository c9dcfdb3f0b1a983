import pytest
import torch

from aiotensor.errors import ProtocolError
from aiotensor.memory.placement import Plan, plan_placement
from aiotensor.memory.tensors import DTYPE_NAMES, MAX_INLINE_BYTES, dtype_from_name
from tests.memory.segments import open_tensor

# The table of openers


def test_invalid_placements_payloads_dtypes_and_shapes_are_refused() -> None:
    for placement, payload, dtype, shape, reason in (
        ("telepathy", b"", "uint8", (0,), "the unknown placement 'telepathy'"),
        ("__class__", b"", "uint8", (0,), "the unknown placement"),
        ("inline", b"", "Tensor", (0,), "unknown dtype 'Tensor'"),
        ("inline", b"x", "uint8", (2,), "sent 1 bytes .* which needs 2"),
        ("inline", b"x", "uint8", (0, 3), "sent 1 bytes .* which needs 0"),
        ("inline", bytes(13), "float32", (3,), "sent 13 bytes .* which needs 12"),
        ("inline", b"", "uint8", (2**63 - 1, 2), "sent 0 bytes"),
        ("inline", b"", "float64", (2**60,), "sent 0 bytes"),
        ("inline", b"", "uint8", (0, 2**62, 2), "more than can be addressed"),
        ("arena", bytes(16), "uint8", (1,), "in segment 0, which it never attached"),
        ("arena", b"\xff" * 16, "uint8", (1,), "in segment 18446744073709551615, which it never attached"),
        *[
            ("arena", bytes(length), "uint8", (1,), f"invalid position of a tensor, of {length} bytes")
            for length in (0, 1, 15, 17, 1000)
        ],
    ):
        with pytest.raises(ProtocolError, match=reason):
            open_tensor(placement, payload, dtype, shape, {})
    assert open_tensor("inline", b"", "uint8", (0, 2**62), {}).shape == (0, 2**62)


# The choice of a placement


def test_a_small_or_empty_tensor_is_placed_inline() -> None:
    for shape in ((MAX_INLINE_BYTES,), (0, 1 << 30), ()):
        source = torch.empty(shape, dtype=torch.uint8)
        assert plan_placement(source, {}) == Plan(0, None)
    expanded = torch.zeros(1, dtype=torch.uint8).expand(MAX_INLINE_BYTES + 1)
    assert plan_placement(expanded, {}) == Plan(MAX_INLINE_BYTES + 1, None)


# Names of dtypes


def test_every_dtype_except_quantized_ones_has_a_name() -> None:
    quantized = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert dtypes - DTYPE_NAMES.keys() == quantized
    for dtype, name in DTYPE_NAMES.items():
        assert str(dtype) == f"torch.{name}"
        assert dtype_from_name(name) is dtype


def test_a_dtype_name_outside_the_table_is_refused() -> None:
    for name in ("", "Tensor", "os", "torch.uint8", "UINT8", "qint8", "__doc__", "float", "x" * 10_000):
        with pytest.raises(ProtocolError, match="of unknown dtype") as caught:
            dtype_from_name(name)
        assert len(str(caught.value)) < 200
