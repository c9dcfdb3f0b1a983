"""Pickles of arbitrary objects, with the bytes of large tensors and arrays in separate buffers."""

import copyreg
import io
import pickle
from typing import Any, TypeAlias

import numpy as np
import torch

from aiotensor.memory.tensors import DTYPE_NAMES, dtype_from_name, new_tensor, view_over

__all__ = ["Parts", "dumps", "loads"]

# A pickle and its buffers. Buffers, and a long pickle, are arrays at the writer and tensors at a reader.
Parts: TypeAlias = list[bytes | np.ndarray[Any, Any] | torch.Tensor]

_IN_BAND_BYTES = 16 * 1024  # a smaller buffer is copied into the pickle


def dumps(obj: object) -> Parts:
    """Pickle an object. Only small buffers are copied."""
    parts: Parts = [b""]

    def keep_apart(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _IN_BAND_BYTES:
            return True
        parts.append(np.frombuffer(raw, np.uint8))
        return False

    with io.BytesIO() as stream:
        pickler = pickle.Pickler(stream, pickle.HIGHEST_PROTOCOL, buffer_callback=keep_apart)
        pickler.dispatch_table = {**copyreg.dispatch_table, torch.Tensor: _reduce}
        pickler.dump(obj)
        head = stream.getvalue()
    parts[0] = head if len(head) < _IN_BAND_BYTES else np.frombuffer(head, np.uint8)
    return parts


def loads(parts: Parts) -> Any:
    """Unpickle an object, whose buffers refer to the parts."""
    head, *buffers = (part.numpy() if isinstance(part, torch.Tensor) else part for part in parts)
    return pickle.loads(head, buffers=buffers)  # type: ignore[arg-type]  # noqa: S301 - of a process of this user


def _reduce(tensor: torch.Tensor) -> tuple[Any, ...] | str:
    """Reduce a tensor to a buffer of its bytes, which torch would copy into the pickle."""
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
        return new_tensor(shape, dtype)
    return view_over(bytearray(view) if view.readonly else view, 0, dtype, shape)[0]
