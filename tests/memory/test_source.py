import gc
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from aiotensor.errors import UnsupportedTensorError
from aiotensor.memory import tensors
from aiotensor.memory.copying import as_tensor
from aiotensor.memory.source import Sendable, as_source


def refusal_of(value: Sendable) -> str:
    with pytest.raises(UnsupportedTensorError) as caught:
        as_source(value)
    return str(caught.value)


def read_only(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    array.setflags(write=False)
    return array


class Box:
    """An object with DLPack over the memory of a tensor."""

    def __init__(self, tensor: torch.Tensor, error: Exception | None = None) -> None:
        self.tensor = tensor
        self.error = error

    def __dlpack__(self, **options: object) -> object:
        if self.error is not None:
            raise self.error
        return self.tensor.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, index = self.tensor.__dlpack_device__()
        return int(kind), index


# What is taken


def test_a_tensor_is_taken_as_it_is() -> None:
    for tensor in (
        torch.zeros(3, 4).t(),
        torch.nn.Parameter(torch.zeros(3)),
        torch.zeros(3, requires_grad=True),
        (torch.zeros(3, requires_grad=True) * 2).detach(),
    ):
        assert as_source(tensor) is tensor


@pytest.mark.parametrize("is_writable", [True, False], ids=["writable", "read-only"])
def test_an_array_is_taken_without_a_copy_and_without_a_warning(is_writable: bool) -> None:
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    for view in (base, base.T, base[1:, ::2], np.broadcast_to(base, (2, 4, 6)), np.asarray(base[2, 3])):
        array = view if is_writable else read_only(view)
        was_writable = array.flags.writeable
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tensor = as_tensor(array)

        assert tensor.data_ptr() == array.__array_interface__["data"][0]
        assert tensor.dtype is torch.float32
        assert np.array_equal(tensor.numpy(), array)
        assert array.flags.writeable is was_writable


def test_a_read_only_array_of_any_dtype_has_the_dtype_that_a_writable_one_has() -> None:
    for kind in ("?", "u1", "i2", "u2", "u4", "u8", "f2", "f8", "c8", "c16"):
        array = np.zeros(3, kind)
        expected = as_tensor(array).dtype
        assert as_tensor(read_only(array)).dtype is expected


def test_the_memory_of_a_read_only_array_lives_for_as_long_as_the_tensor() -> None:
    tensor = as_tensor(read_only(np.full(1 << 20, 7, np.uint8)))
    gc.collect()
    np.full(1 << 20, 9, np.uint8)  # would find the memory, were it free

    assert torch.equal(tensor, torch.full((1 << 20,), 7, dtype=torch.uint8))


def test_an_array_of_no_elements_is_taken() -> None:
    assert as_source(read_only(np.zeros((0, 3), np.uint8))).shape == (0, 3)
    assert as_source(np.zeros((0, 3), np.uint8)[:, ::-1]).shape == (0, 3)


# Refusals, each with its reason or a remedy


class Named(torch.Tensor):
    """A subclass that the receiver does not have."""


class Special(torch.nn.Parameter):
    """A subclass of parameters."""


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=layout)


def freed(count: int) -> torch.Tensor:
    tensor = torch.zeros(count)
    tensor.untyped_storage().resize_(0)
    return tensor


_BOX = r"'Box'.*it is somewhere else.*send a CPU copy"
_NUMBERS = "send it as an array of numbers"
_SWAPPED = r"send array\.astype\(array\.dtype\.newbyteorder\('='\)\)"
REFUSALS: list[tuple[Callable[[], Any], str]] = [
    (lambda: torch.eye(3).to_sparse(), r"send tensor\.to_dense\(\)"),
    (lambda: torch.eye(3).to_sparse_csr(), r"send tensor\.to_dense\(\)"),
    (lambda: nested(torch.strided), r"tensor\.unbind\(\)"),
    (lambda: nested(torch.jagged), "[nN]ested"),
    (
        lambda: torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.quint8),
        r"send tensor\.int_repr\(\) and its scale and zero point",
    ),
    (lambda: TwoTensor(torch.zeros(3), torch.ones(3)), "'TwoTensor'.*send the tensors that it is made of"),  # type: ignore[no-untyped-call]
    (lambda: torch.zeros(3).as_subclass(Named), r"'Named'.*send tensor\.as_subclass\(torch\.Tensor\)"),
    (lambda: Special(torch.zeros(3)), "'Special'"),
    (lambda: torch.empty(3, device="meta"), r"meta device has no values(?!.*tensor\.cpu\(\))"),
    *((lambda count=count: freed(count), "without memory") for count in (5, 100_000)),
    *((lambda count=count: torch._efficientzerotensor(count), "without memory") for count in (5, 100_000)),
    (lambda: np.array(["2025-01-01"], "datetime64[s]"), rf"dtype datetime64\[s\].*{_NUMBERS}"),
    (lambda: np.zeros(2, [("x", "<f4"), ("y", "<f4")]), _NUMBERS),
    (lambda: np.array(["text", "more"]), f"dtype <U4.*{_NUMBERS}"),
    (lambda: np.zeros(2, np.longdouble), f"dtype float128.*{_NUMBERS}"),
    (lambda: read_only(np.array([object(), None])), f"dtype object.*{_NUMBERS}"),
    (lambda: np.zeros(3, ">i4"), _SWAPPED),
    (lambda: np.zeros(3, [("x", ">f4")]), _SWAPPED),
    (lambda: np.ma.array([1, 2, 3], mask=[False, True, False]), "mask"),
    *(
        (lambda error=error: Box(torch.zeros(3), error("it is somewhere else")), _BOX)
        for error in (BufferError, RuntimeError, TypeError, ValueError)
    ),
]


@pytest.mark.filterwarnings(
    "ignore:Sparse CSR tensor support is in beta:UserWarning",
    "ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning",
    "ignore:.*quantize:UserWarning",
    "ignore:.*quantize:DeprecationWarning",
)
def test_what_cannot_be_sent_is_refused_with_a_reason_or_a_remedy() -> None:
    for make, text in REFUSALS:
        assert re.search(text, refusal_of(make()), re.DOTALL), text


def test_a_tensor_of_a_dtype_that_a_later_torch_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(tensors.DTYPE_NAMES, torch.float16)

    assert refusal_of(torch.zeros(3, dtype=torch.float16)) == (
        "a tensor of torch.float16 cannot be sent: send tensor.view(torch.uint8)"
    )


def test_a_tensor_inside_a_function_that_torch_transforms_is_refused() -> None:
    def refuse(tensor: torch.Tensor) -> torch.Tensor:
        assert "without memory" in refusal_of(tensor)
        return tensor.sum()

    torch.vmap(refuse)(torch.zeros(2, 3))
    torch.func.grad(refuse)(torch.zeros(3))
    torch.func.functionalize(refuse)(torch.zeros(3))


def test_a_tensor_with_named_dimensions_as_an_earlier_torch_has_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.Tensor, "names", (None, "width"), raising=False)
    assert "send tensor.rename(None)" in refusal_of(torch.zeros(2, 3))

    monkeypatch.setattr(torch.Tensor, "names", (None, None), raising=False)
    assert as_source(torch.zeros(2, 3)).shape == (2, 3)


def test_a_value_that_is_not_a_tensor_raises_type_error() -> None:
    values: list[Any] = [b"bytes", [1, 2], 3.0, None, "path", np.float32(3)]
    for value in values:
        with pytest.raises(TypeError, match="pass a torch tensor, a numpy array") as caught:
            as_source(value)
        assert not isinstance(caught.value, UnsupportedTensorError)
    tensors: Any = [torch.zeros(3)]
    with pytest.raises(TypeError, match=r"sender\.message\(\)"):
        as_source(tensors)
