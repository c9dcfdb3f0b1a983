"""Pickles of arbitrary objects, with the bytes of tensors and arrays as separate tensors."""

import copyreg
import io
import pickle
from typing import Any, TypeAlias

import torch

from aiotensor.tensors.dtypes import DTYPE_NAMES, dtype_from_name

__all__ = ["Parts", "dumps", "loads"]

# A pickle, and its buffers. The pickle is a tensor, too, if it is long.
Parts: TypeAlias = list[bytes | torch.Tensor]

_IN_BAND_BYTES = 16 * 1024  # a smaller buffer is copied into the pickle


def dumps(obj: object) -> Parts:
    """Pickle an object. Its buffers are not copied, unless they are small."""
    parts: Parts = [b""]

    def keep_apart(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _IN_BAND_BYTES:
            return True
        parts.append(_bytes_of(raw))
        return False

    with io.BytesIO() as stream:
        pickler = pickle.Pickler(stream, pickle.HIGHEST_PROTOCOL, buffer_callback=keep_apart)
        pickler.dispatch_table = {**copyreg.dispatch_table, torch.Tensor: _reduce}
        pickler.dump(obj)
        head = stream.getvalue()
    parts[0] = head if len(head) < _IN_BAND_BYTES else _bytes_of(bytearray(head))
    return parts


def loads(parts: Parts) -> Any:
    """Return the object of a pickle, whose buffers refer to the parts."""
    head, *buffers = (part.numpy().data if isinstance(part, torch.Tensor) else part for part in parts)
    return pickle.loads(head, buffers=buffers)  # noqa: S301 - of a process of this user


def _bytes_of(buffer: "memoryview | bytearray") -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _reduce(tensor: torch.Tensor) -> tuple[Any, ...] | str:
    """Reduce a tensor to its bytes as a buffer; torch would copy them into the pickle."""
    name = DTYPE_NAMES.get(tensor.dtype)
    if name is not None and tensor.is_cpu and tensor.layout == torch.strided and not tensor.requires_grad:
        try:
            raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        except RuntimeError:
            pass  # for example, its conjugation is pending
        else:
            return _rebuild, (pickle.PickleBuffer(raw), tuple(tensor.shape), name)
    return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call, no-any-return]


def _rebuild(buffer: Any, shape: tuple[int, ...], name: str) -> torch.Tensor:
    dtype = dtype_from_name(name)
    view = memoryview(buffer)
    if not view.nbytes:
        return torch.empty(shape, dtype=dtype)
    writable = bytearray(view) if view.readonly else view
    return torch.frombuffer(writable, dtype=torch.uint8).view(dtype).view(shape)
