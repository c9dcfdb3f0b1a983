"""The placeholder of a tensor in a message of vLLM, which identifies the tensor."""

from typing import Annotated, Any

import msgspec

from aiotensor.errors import ProtocolError
from aiotensor.types import Number, TensorHandle

__all__ = ["data_of", "handle_of"]


class _Data(msgspec.Struct, forbid_unknown_fields=True):
    sender: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    message: Number
    tensor: Number


def data_of(handle: TensorHandle) -> dict[str, Any]:
    """Return the placeholder for a handle. The message of vLLM itself contains the dtype and the shape."""
    return {"sender": handle.sender, "message": handle.message, "tensor": handle.tensor}


def handle_of(dtype: str, shape: tuple[int, ...], data: dict[str, Any]) -> TensorHandle:
    """Return the handle for a placeholder, and for the dtype and shape in the message.

    Raises:
        ProtocolError: the placeholder was made by another implementation of vLLM's hooks.
    """
    try:
        names = msgspec.convert(data, _Data)
    except msgspec.ValidationError as error:
        raise ProtocolError(
            f"this placeholder of a tensor was not created by a TensorConsumer ({error}): use a "
            "TensorConsumer at the encoder"
        ) from error
    return TensorHandle(names.sender, names.message, names.tensor, dtype, tuple(shape), "cpu")
