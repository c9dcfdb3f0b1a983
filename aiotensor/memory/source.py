"""Validation of the values to send: tensors, arrays and DLPack objects become sources."""

from typing import Final, Protocol, TypeAlias, TypeGuard, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import Parameter

from aiotensor.errors import UnsupportedTensorError
from aiotensor.memory.tensors import DTYPE_NAMES, DTYPES, ArrayMemory, is_addressable
from aiotensor.protocol.frames import MAX_DIMENSIONS, Attributes

DEVICE: Final = "cpu"  # that of all sources
REGISTERED: Final = 2  # `isbuiltin` of dtypes that another package has added to numpy, such as ml_dtypes
_UNSIGNED = {1: np.uint8, 2: np.uint16}


@runtime_checkable
class SupportsDLPack(Protocol):
    """An object that shares its memory through the DLPack protocol."""

    def __dlpack__(self, *, stream: object = ...) -> object: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


Sendable: TypeAlias = torch.Tensor | npt.NDArray[np.generic] | SupportsDLPack


class ArraySource:
    """An array that torch cannot view, because its strides are negative or not multiples of the item size.

    It takes the place of a tensor until its values are copied into granted memory, and has the attributes of
    a tensor that sending uses.
    """

    __slots__ = ("array", "dtype", "nbytes", "shape")

    requires_grad: Final = False

    def __init__(self, array: npt.NDArray[np.generic], dtype: torch.dtype) -> None:
        self.array = array
        self.dtype = dtype
        self.shape = array.shape
        self.nbytes = array.nbytes

    def data_ptr(self) -> int:
        """Return the address of the first element."""
        address: int = self.array.__array_interface__["data"][0]
        return address

    def is_contiguous(self) -> bool:
        """Return False, since torch cannot read the values."""
        return False

    def is_conj(self) -> bool:
        """Return False, since numpy has no conjugate views."""
        return False

    def is_neg(self) -> bool:
        """Return False, since numpy has no negative views."""
        return False


# A value to send, whose memory is read once there is a block for it.
Source: TypeAlias = torch.Tensor | ArraySource


def is_flat(source: Source) -> TypeGuard[torch.Tensor]:
    """Return whether the memory of a source consists of its values, in row-major or in a permuted order."""
    return (
        (source.is_contiguous() or bool(memory_order(source)))
        and not source.is_conj()
        and not source.is_neg()
    )


def attributes_of(source: Source) -> Attributes | None:
    """Return the attributes that a receiver needs to rebuild a source; None for an ordinary tensor."""
    is_parameter = type(source) is Parameter
    order: tuple[int, ...] = ()
    # A dimension of one element may have any stride: an image of one channel is always contiguous.
    if (not source.is_contiguous() or (1 in source.shape and source.nbytes)) and is_flat(source):
        order = memory_order(source)
        if order == tuple(range(len(order))):
            order = ()
    if source.requires_grad or is_parameter or order:
        return Attributes(source.requires_grad, is_parameter, order)
    return None


def memory_order(source: Source) -> tuple[int, ...]:
    """Return the dimensions, outermost in memory first; an empty tuple if the memory has gaps or overlaps."""
    if isinstance(source, ArraySource):
        return ()
    shape, strides = source.shape, source.stride()
    # A dimension of one element may have the stride of the next one: it is then the inner one of the two.
    order = sorted(
        range(len(strides)), key=lambda dimension: (strides[dimension], shape[dimension]), reverse=True
    )
    expected = 1
    for dimension in reversed(order):
        if shape[dimension] != 1:
            if strides[dimension] != expected:
                return ()
            expected *= shape[dimension]
    return tuple(order)


def as_source(value: Sendable) -> Source:
    """Validate a value to send, and return a source over its memory, without a copy.

    Raises:
        TypeError: the value is not a tensor or an array, and has no ``__dlpack__``.
        UnsupportedTensorError: the value cannot be sent unchanged; the text states the reason and a remedy.
    """
    tensor = value if isinstance(value, torch.Tensor) else _from_other(value)
    if isinstance(tensor, ArraySource):
        return tensor
    if type(tensor) is not torch.Tensor and type(tensor) is not Parameter:
        if type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
            remedy = "send tensor.as_subclass(torch.Tensor) and wrap it again there"
        else:  # its values are in other tensors
            remedy = "send the tensors that it is made of, such as tensor.to_local() of a DTensor"
        raise UnsupportedTensorError(
            f"a tensor of the subclass {type(tensor).__name__!r} cannot be rebuilt by the receiver: {remedy}"
        )
    if tensor.is_nested:
        raise UnsupportedTensorError(
            "a nested tensor cannot be sent as one block: send its parts as one message, tensor.unbind()"
        )
    if tensor.layout is not torch.strided:
        raise UnsupportedTensorError(
            f"a tensor of layout {tensor.layout} cannot be sent: send tensor.to_dense(), or its parts"
        )
    if tensor.is_quantized:
        raise UnsupportedTensorError(
            "a quantized tensor would lose its scale: send tensor.int_repr() and its scale and zero point"
        )
    if tensor.is_meta:
        raise UnsupportedTensorError("a tensor on the meta device has no values: send one on the cpu")
    if not tensor.is_cpu:
        raise UnsupportedTensorError(f"a tensor on device {tensor.device} cannot be sent: send tensor.cpu()")
    if tensor.dtype not in DTYPE_NAMES:
        raise UnsupportedTensorError(
            f"a tensor of {tensor.dtype} cannot be sent: send tensor.view(torch.uint8)"
        )
    if tensor.dim() > MAX_DIMENSIONS:
        raise UnsupportedTensorError(
            f"a tensor of {tensor.dim()} dimensions cannot be sent: reshape it to at most {MAX_DIMENSIONS}"
        )
    nbytes = tensor.numel() * tensor.element_size()
    if not 0 < nbytes < 2**63 and not is_addressable(tensor.shape, tensor.element_size()):
        raise UnsupportedTensorError(
            f"a tensor of shape {tuple(tensor.shape)} cannot be sent: send one of smaller sizes"
        )
    try:
        has_memory = tensor.data_ptr() != 0
    except RuntimeError:  # in a function that `torch.func` transforms
        has_memory = False
    if not has_memory and nbytes:
        raise UnsupportedTensorError(
            "a tensor without memory has no values to send: it is a zero tensor, its storage was freed, or "
            "it is inside a transformation of torch.func"
        )
    if tensor.requires_grad and not tensor.is_leaf:
        raise UnsupportedTensorError("a tensor with a gradient history would lose it: send tensor.detach()")
    if hasattr(tensor, "names") and any(tensor.names):  # recent releases of torch do not have it
        raise UnsupportedTensorError(
            "a tensor with named dimensions would lose the names: send tensor.rename(None)"
        )
    return tensor


def _from_other(value: object) -> Source:
    if isinstance(value, np.ndarray):
        return _from_numpy(value)
    if isinstance(value, SupportsDLPack):
        return _from_dlpack(value)
    raise TypeError(
        f"cannot send {type(value).__name__!r}: pass a torch tensor, a numpy array, or an object with "
        "__dlpack__; a message of several tensors is sent with `async with sender.message()`"
    )


def _from_numpy(array: npt.NDArray[np.generic]) -> Source:
    if isinstance(array, np.ma.MaskedArray):
        raise UnsupportedTensorError(
            "a masked array would lose its mask: send array.data and array.mask as one message"
        )
    if not array.dtype.isnative:
        raise UnsupportedTensorError(
            f"an array of dtype {array.dtype} is in the byte order of another machine: "
            "send array.astype(array.dtype.newbyteorder('='))"
        )
    if array.dtype.isbuiltin == REGISTERED and (dtype := DTYPES.get(array.dtype.name)) is not None:
        # A dtype of the package ml_dtypes, such as bfloat16, which torch has under the same name.
        bits = array.view(_UNSIGNED[array.itemsize])
        source = _from_numpy(bits)
        return (torch.from_numpy(bits.copy()) if isinstance(source, ArraySource) else source).view(dtype)
    if any(stride < 0 or stride % max(array.itemsize, 1) for stride in array.strides):
        if array.nbytes:
            return ArraySource(array, _view(np.empty(0, array.dtype)).dtype)
        array = array.copy()  # it is empty
    if array.flags.writeable:
        return _view(array)
    # The array is declared as writable, so that torch accepts it without a warning; the sender only reads it.
    # Copying it first would take as long as sending it.
    interface = array.__array_interface__
    alias = ArrayMemory(array, {**interface, "data": (interface["data"][0], False)})
    return _view(np.asarray(alias))


def _view(array: npt.NDArray[np.generic]) -> torch.Tensor:
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise UnsupportedTensorError(
            f"torch has no dtype for an array of dtype {array.dtype}: send it as an array of numbers"
        ) from error


def _from_dlpack(value: SupportsDLPack) -> torch.Tensor:
    try:
        tensor: torch.Tensor = torch.from_dlpack(value)  # type: ignore[attr-defined]
    except (RuntimeError, BufferError, TypeError, ValueError) as error:
        raise UnsupportedTensorError(
            f"torch cannot import this {type(value).__name__!r} by DLPack ({error}): send a CPU copy of it"
        ) from error
    return tensor
