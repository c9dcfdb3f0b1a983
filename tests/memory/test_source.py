import gc
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from aiotensor.errors import UnsupportedTensorError
from aiotensor.memory import dtypes
from aiotensor.memory.gathering import as_tensor
from aiotensor.memory.source import Sendable, SupportsDLPack, as_source


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


def test_a_dlpack_object_is_taken_without_a_copy() -> None:
    memory = torch.arange(6).reshape(2, 3)
    box = Box(memory)
    tensor = as_tensor(box)

    assert isinstance(box, SupportsDLPack)
    assert tensor.data_ptr() == memory.data_ptr()
    assert torch.equal(tensor, memory)


# Refusals, each with its reason and a remedy


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_a_sparse_tensor_is_refused() -> None:
    for tensor in (torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()):
        assert "send tensor.to_dense()" in refusal_of(tensor)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_a_nested_tensor_is_refused() -> None:
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=layout)
        assert "nested" in refusal_of(nested).lower()
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    assert "tensor.unbind()" in refusal_of(nested)
    assert all(as_source(part) is part for part in nested.unbind())


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning", "ignore:.*quantize:DeprecationWarning")
def test_a_quantized_tensor_is_refused() -> None:
    quantized = torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.quint8)

    assert "send tensor.int_repr() and its scale and zero point" in refusal_of(quantized)
    assert as_source(quantized.int_repr()).dtype is torch.uint8


class Named(torch.Tensor):
    """A subclass that the receiver does not have."""


def test_a_subclass_that_contains_other_tensors_is_refused_with_another_remedy() -> None:
    wrapper = TwoTensor(torch.zeros(3), torch.ones(3))  # type: ignore[no-untyped-call]
    assert "'TwoTensor'" in refusal_of(wrapper)
    assert "send the tensors that it is made of" in refusal_of(wrapper)


def test_a_subclass_is_refused_by_name() -> None:
    class Special(torch.nn.Parameter):
        pass

    subclass = torch.zeros(3).as_subclass(Named)

    assert "'Named'" in refusal_of(subclass)
    assert "send tensor.as_subclass(torch.Tensor)" in refusal_of(subclass)
    assert type(as_source(subclass.as_subclass(torch.Tensor))) is torch.Tensor
    assert "'Special'" in refusal_of(Special(torch.zeros(3)))


def test_a_meta_tensor_is_refused_without_useless_advice() -> None:
    text = refusal_of(torch.empty(3, device="meta"))

    assert "meta device has no values" in text
    assert "tensor.cpu()" not in text


def test_a_tensor_of_a_dtype_that_a_later_torch_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(dtypes.DTYPE_NAMES, torch.float16)

    assert refusal_of(torch.zeros(3, dtype=torch.float16)) == (
        "a tensor of torch.float16 cannot be sent: send tensor.view(torch.uint8)"
    )


def test_a_tensor_without_memory_is_refused() -> None:
    for count in (5, 100_000):
        freed = torch.zeros(count)
        freed.untyped_storage().resize_(0)
        for tensor in (freed, torch._efficientzerotensor(count)):
            assert "without memory" in refusal_of(tensor)
    assert as_tensor(torch.zeros(0)).numel() == 0


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


def test_an_array_that_torch_cannot_represent_is_refused() -> None:
    for array in (
        np.array(["2025-01-01", "2025-01-02"], "datetime64[s]"),
        np.zeros(2, [("x", "<f4"), ("y", "<f4")]),
        np.array(["text", "more"]),
        np.zeros(2, np.longdouble),
        np.array([object(), None]),
    ):
        for one in (array, read_only(array.copy())):
            text = refusal_of(one)
            assert f"dtype {array.dtype}" in text
            assert "send it as an array of numbers" in text
    for dtype in (">i4", np.dtype([("x", ">f4")])):
        array = np.zeros(3, dtype)
        assert "send array.astype(array.dtype.newbyteorder('='))" in refusal_of(array)
        assert array.astype(array.dtype.newbyteorder("=")).dtype.isnative
    assert "mask" in refusal_of(np.ma.array([1, 2, 3], mask=[False, True, False]))


def test_a_failed_dlpack_export_is_refused_with_its_reason() -> None:
    for error in (BufferError, RuntimeError, TypeError, ValueError):
        text = refusal_of(Box(torch.zeros(3), error("it is somewhere else")))
        assert "'Box'" in text
        assert "it is somewhere else" in text
        assert "send a CPU copy" in text


def test_a_value_that_is_not_a_tensor_raises_type_error() -> None:
    values: list[Any] = [b"bytes", [1, 2], 3.0, None, "path", np.float32(3)]
    for value in values:
        with pytest.raises(TypeError, match="pass a torch tensor, a numpy array") as caught:
            as_source(value)
        assert not isinstance(caught.value, UnsupportedTensorError)
    tensors: Any = [torch.zeros(3)]
    with pytest.raises(TypeError, match=r"sender\.message\(\)"):
        as_source(tensors)
