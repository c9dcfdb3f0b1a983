"""`TensorMeta`, an annotation that states the dtype and the shape of a tensor in a message."""

from typing import Any

import msgspec
import numpy as np
import torch


class MismatchError(Exception):
    """A tensor does not match its annotation.

    Attributes:
        path: the path of the tensor in the message; the check of each Struct prepends one element.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.path = ""


class TensorMeta(msgspec.Struct, frozen=True):
    """State the dtype and the shape of a tensor or an array in a message.

    Use it as ``Annotated[torch.Tensor, TensorMeta(dtype=torch.uint8, shape=(None, None, None, 3))]``, for a
    field of a `msgspec.Struct` or for a message that is a bare tensor. It cannot annotate the items of a list
    or a dict, nor the fields of other classes.

    Attributes:
        dtype: the required torch dtype, for arrays as well; None for any dtype.
        shape: the required sizes of the dimensions, in elements, with None for a dimension of any size. None
            instead of a tuple allows any shape.

    Raises:
        TypeError: the dtype is not a torch dtype, or the shape is not a tuple of sizes.
        ValueError: a size is negative.
    """

    dtype: torch.dtype | None = None
    shape: tuple[int | None, ...] | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None and not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype such as torch.uint8, got {self.dtype!r}")
        shape: Any = self.shape
        if shape is None:
            return
        if not isinstance(shape, tuple | list) or not all(isinstance(size, int | None) for size in shape):
            raise TypeError(f"shape must be a tuple of sizes, with None for any size, got {shape!r}")
        if any(size is not None and size < 0 for size in shape):
            raise ValueError(f"the sizes of a shape must not be negative, got {shape}")
        msgspec.structs.force_setattr(self, "shape", tuple(shape))

    def check(self, value: object) -> None:
        """Check a value; anything but a tensor or an array is ignored.

        Raises:
            MismatchError: the dtype or the shape differs; the text states the expected and the actual one.
        """
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value)
        if not isinstance(value, torch.Tensor):
            return
        dtype, shape = value.dtype, tuple(value.shape)
        wanted = shape if self.shape is None else self.shape
        if (
            self.dtype not in (None, dtype)
            or len(wanted) != len(shape)
            or any(want not in (None, size) for want, size in zip(wanted, shape, strict=True))
        ):
            raise MismatchError(
                f"expected {_describe(self.dtype, self.shape)}, found {_describe(dtype, shape)}"
            )


def _describe(dtype: torch.dtype | None, shape: tuple[int | None, ...] | None) -> str:
    name = "any dtype" if dtype is None else str(dtype).removeprefix("torch.")
    if shape is None:
        return f"{name} of any shape"
    sizes = ", ".join("any" if size is None else str(size) for size in shape)
    return f"{name} of shape ({sizes}{',' if len(shape) == 1 else ''})"
