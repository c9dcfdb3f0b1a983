"""Estimate which messages take so long to encode that they should be encoded in a thread."""

import dataclasses
import datetime
import decimal
import enum
import itertools
import uuid
from collections.abc import Collection
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

# No quick message has more parts.
_MOST_PARTS = _QUICK_BYTES // _ITEM_BYTES + 1

_PLAIN, _SIZED, _BUFFER, _ITEMS, _PAIRS, _TENSOR = range(6)

_KINDS: dict[type, int] = {
    **dict.fromkeys((bool, int, float, type(None), uuid.UUID, decimal.Decimal, enum.Enum), _PLAIN),
    np.generic: _PLAIN,
    **dict.fromkeys((datetime.datetime, datetime.date, datetime.time, datetime.timedelta), _PLAIN),
    **dict.fromkeys((str, bytes, bytearray), _SIZED),
    memoryview: _BUFFER,
    **dict.fromkeys((list, tuple, set, frozenset), _ITEMS),
    dict: _PAIRS,
    **dict.fromkeys((torch.Tensor, Parameter, np.ndarray), _TENSOR),
}


def cost_of(message: object) -> tuple[bool, int]:
    """Return whether encoding a message may block the event loop for too long, and its least size in bytes.

    The size is that of strings and bytes: encoding holds the GIL, for 160 ms for 200 MB, so a message that is
    too large can be refused before. The function visits a limited number of parts of the message, which costs
    about as much as encoding them. Tensors of more than a few KiB are not encoded.
    """
    left, nbytes = _QUICK_BYTES, 0
    pending: list[Any] = [message]
    for value in itertools.islice(pending, _MOST_PARTS):  # the loop appends to it
        kind = _KINDS.get(type(value))
        if kind is None and not isinstance(value, msgspec.Struct):
            kind = next((_KINDS[base] for base in type(value).__mro__ if base in _KINDS), None)
        if kind == _PLAIN:
            continue
        if kind == _SIZED:
            nbytes += len(value)
        elif kind == _BUFFER:
            nbytes += value.nbytes
        elif kind == _TENSOR:
            left -= _TENSOR_BYTES
        elif kind == _PAIRS:
            left -= 2 * _ITEM_BYTES * len(value)
            if len(pending) < _MOST_PARTS:
                pending += itertools.islice(value.values(), _MOST_PARTS)
                pending += itertools.islice(value, _MOST_PARTS)
        else:
            if isinstance(value, msgspec.Struct):
                inside: Collection[object] | None = astuple(value)
            else:
                inside = value if kind == _ITEMS else _look_into(value)
            if inside is not None:
                left -= _ITEM_BYTES * len(inside)
                if len(pending) < _MOST_PARTS:
                    pending += itertools.islice(inside, _MOST_PARTS)
            elif isinstance(value, SupportsDLPack):
                left -= _TENSOR_BYTES
            else:
                left = -1
    return left < nbytes, nbytes


def _look_into(value: Any) -> Collection[object] | None:
    """Return the parts of a dataclass or an attrs class; None for any other value."""
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    fields = getattr(value, "__attrs_attrs__", None)
    if fields is None:
        return None
    # msgspec does not encode private attributes of attrs classes.
    return [getattr(value, field.name, None) for field in fields if not field.name.startswith("_")]
