"""Decide which messages take so long to encode that they should be encoded in a thread."""

import dataclasses
import datetime
import decimal
import enum
import itertools
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec.structs import astuple
from torch.nn import Parameter

from aiotensor.memory.source import SupportsDLPack

# The cost of encoding is estimated as a number of bytes; encoding `_QUICK_BYTES` takes a tenth of a
# millisecond. An item of a container counts as `_ITEM_BYTES`.
_QUICK_BYTES = 64 * 1024
_ITEM_BYTES = 32

# The maximum number of tensors to encode or decode on the event loop; each takes a few microseconds.
QUICK_CODED_TENSORS = 128
_TENSOR_BYTES = _QUICK_BYTES // QUICK_CODED_TENSORS

_MOST_PARTS = 2000

_PLAIN, _SIZED, _BUFFER, _ITEMS, _PAIRS, _TENSOR = range(6)

_KINDS: dict[type, int] = {
    **dict.fromkeys((bool, int, float, type(None), uuid.UUID, decimal.Decimal), _PLAIN),
    np.generic: _PLAIN,
    **dict.fromkeys((datetime.datetime, datetime.date, datetime.time, datetime.timedelta), _PLAIN),
    **dict.fromkeys((str, bytes, bytearray), _SIZED),
    memoryview: _BUFFER,
    **dict.fromkeys((list, tuple, set, frozenset), _ITEMS),
    dict: _PAIRS,
    **dict.fromkeys((torch.Tensor, Parameter, np.ndarray), _TENSOR),
}


def takes_long(message: object) -> bool:
    """Return whether encoding a message may block the event loop for too long.

    The function visits the parts of the message until the limit is exceeded, which costs about as much as
    encoding them. Tensors of more than a few KiB are not encoded.
    """
    left = _QUICK_BYTES
    pending: list[Any] = [message]
    for value in pending:  # the loop appends to it
        kind = _KINDS.get(type(value))
        if kind is None and not isinstance(value, msgspec.Struct):
            kind = next((_KINDS[base] for base in type(value).__mro__ if base in _KINDS), None)
        if kind == _PLAIN:
            continue
        if kind == _SIZED:
            left -= len(value)
        elif kind == _BUFFER:
            left -= value.nbytes
        elif kind == _TENSOR:
            left -= _TENSOR_BYTES
        elif kind == _ITEMS:
            left -= _ITEM_BYTES * len(value)
            if left >= 0:
                pending += value
        elif kind == _PAIRS:
            left -= 2 * _ITEM_BYTES * len(value)
            if left >= 0:
                pending += value
                pending += value.values()
        else:
            inside = astuple(value) if isinstance(value, msgspec.Struct) else _look_into(value)
            if inside is not None:
                left -= _ITEM_BYTES * len(inside)
                pending += inside
            elif isinstance(value, SupportsDLPack):
                left -= _TENSOR_BYTES
            else:
                return True
        if left < 0:
            return True
    return False


def least_bytes(message: object) -> int:
    """Return a lower bound of the size of the encoded message in bytes: that of its strings and bytes.

    Encoding holds the GIL, for 160 ms for 200 MB, so a message that is too large is refused by this size. The
    function visits at most `_MOST_PARTS` parts of the message, which takes less than a millisecond.
    """
    found = 0
    pending: list[Any] = [message]
    for value in itertools.islice(pending, _MOST_PARTS):  # the loop appends to it
        kind = _KINDS.get(type(value))
        if kind == _SIZED:
            found += len(value)
        elif kind == _BUFFER:
            found += value.nbytes
        elif kind == _ITEMS and len(value) <= _MOST_PARTS:
            pending += value
        elif kind == _PAIRS and len(value) <= _MOST_PARTS:
            pending += value.values()
        elif isinstance(value, msgspec.Struct):
            pending += astuple(value)
    return found


def _look_into(value: Any) -> Sequence[object] | None:
    """Return the parts of a value of a less common type; None if they are unknown."""
    if isinstance(value, enum.Enum):
        return (value.value,)
    if isinstance(value, msgspec.Raw):
        return (memoryview(value),)
    if isinstance(value, msgspec.msgpack.Ext):
        return (value.data,)
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    elif hasattr(value, "__attrs_attrs__"):
        names = [attribute.name for attribute in value.__attrs_attrs__]
    else:
        return None
    return [getattr(value, name, None) for name in names]
