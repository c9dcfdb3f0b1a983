"""Decide which messages take so long to encode that a thread should do it."""

import dataclasses
import datetime
import decimal
import enum
import uuid
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec.structs import astuple
from torch.nn import Parameter

from aiotensor.tensors.copying import QUICK_BYTES
from aiotensor.tensors.source import SupportsDLPack, is_flat

__all__ = ["QUICK_CODED_TENSORS", "takes_long"]

# The bytes that are copied in a tenth of a millisecond of encoding; an item of a container counts as some.
_QUICK_BYTES = 64 * 1024
_ITEM_BYTES = 32

# Encoding or decoding a tensor takes some microseconds.
QUICK_CODED_TENSORS = 128
_TENSOR_BYTES = _QUICK_BYTES // QUICK_CODED_TENSORS

_PLAIN, _SIZED, _ITEMS, _PAIRS, _TENSOR, _OTHER = range(6)

_KINDS: dict[type, int] = {
    **dict.fromkeys((bool, int, float, type(None), uuid.UUID, decimal.Decimal), _PLAIN),
    **dict.fromkeys((datetime.datetime, datetime.date, datetime.time, datetime.timedelta), _PLAIN),
    **dict.fromkeys((str, bytes, bytearray), _SIZED),
    **dict.fromkeys((list, tuple, set, frozenset), _ITEMS),
    dict: _PAIRS,
    **dict.fromkeys((torch.Tensor, Parameter), _TENSOR),
}


def takes_long(message: object, *, has_sender: bool) -> bool:
    """Return whether encoding a message may take longer than the event loop can wait.

    Visits the parts of the message until the limit is exceeded, at about the cost of encoding them.

    Args:
        message: the message.
        has_sender: whether a sender sends tensors of more than a few KiB, which are not encoded.
    """
    left = _QUICK_BYTES
    to_gather = QUICK_BYTES
    pending: list[Any] = [message]
    for value in pending:  # the loop appends to it
        kind = _KINDS.get(type(value), _OTHER)
        if kind == _PLAIN:
            continue
        if kind == _SIZED:
            left -= len(value)
        elif kind == _TENSOR:
            left -= _TENSOR_BYTES
            if not (has_sender or _is_flat(value)):
                to_gather -= value.numel() * value.element_size()
        elif kind == _ITEMS:
            left -= _ITEM_BYTES * len(value)
            if left >= 0:
                pending += value
        elif kind == _PAIRS:
            left -= 2 * _ITEM_BYTES * len(value)
            if left >= 0:
                pending += value
                pending += value.values()
        elif isinstance(value, msgspec.Struct):
            fields = astuple(value)
            left -= _ITEM_BYTES * len(fields)
            pending += fields
        else:
            found = _look_into(value)
            if found is None:
                return True
            left -= found.nbytes
            to_gather -= 0 if has_sender else found.to_gather
            pending += found.inside
        if left < 0 or to_gather < 0:
            return True
    return False


def _is_flat(tensor: torch.Tensor) -> bool:
    try:
        return is_flat(tensor)
    except RuntimeError:
        return True  # it has no strides, such as a sparse tensor: the encoder rejects it at once


class _Found(NamedTuple):
    nbytes: int
    inside: Iterable[object] = ()
    to_gather: int = 0


def _look_into(value: Any) -> _Found | None:
    """Measure a value of a less frequent type; return None if it is unknown or large."""
    found: _Found | None = None
    if isinstance(value, np.ndarray):
        # torch cannot view some of the others: assume that all of them have to be gathered.
        lies_flat = value.flags.c_contiguous and value.flags.aligned
        found = _Found(_TENSOR_BYTES, to_gather=0 if lies_flat else value.nbytes)
    elif dataclasses.is_dataclass(value):
        found = _fields(value, [field.name for field in dataclasses.fields(value)])
    elif isinstance(value, enum.Enum):
        found = _Found(_ITEM_BYTES, (value.value,))
    elif isinstance(value, str):
        found = _Found(len(value))
    elif isinstance(value, memoryview | msgspec.Raw):
        found = _Found(memoryview(value).nbytes)
    elif isinstance(value, msgspec.msgpack.Ext):
        found = _Found(_ITEM_BYTES, (value.data,))
    elif isinstance(value, dict):
        nbytes = 2 * _ITEM_BYTES * len(value)
        found = _Found(nbytes, (*value, *value.values())) if nbytes <= _QUICK_BYTES else None
    elif isinstance(value, list | tuple | set | frozenset):
        nbytes = _ITEM_BYTES * len(value)
        found = _Found(nbytes, value) if nbytes <= _QUICK_BYTES else None
    elif hasattr(value, "__attrs_attrs__"):
        found = _fields(value, [attribute.name for attribute in value.__attrs_attrs__])
    elif isinstance(value, SupportsDLPack):
        # Its size and strides are known only from `__dlpack__`, which may take long itself.
        found = _Found(_TENSOR_BYTES, to_gather=QUICK_BYTES + 1)
    return found


def _fields(value: object, names: list[str]) -> _Found:
    return _Found(_ITEM_BYTES * len(names), [getattr(value, name, None) for name in names])
