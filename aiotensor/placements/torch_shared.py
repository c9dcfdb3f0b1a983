"""Tensors in torch's own shared memory, one block each, named by torch's own pickle."""

import errno
import math
import pickle
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import torch

from aiotensor.errors import ProtocolError
from aiotensor.placements import descriptors as with_descriptors
from aiotensor.placements.copying import copy_exactly

__all__ = ["Allocations", "copy_to_shared", "name_shared", "new_shared", "open_shared"]


class _Descriptor(msgspec.Struct, frozen=True, array_like=True):
    """Say where in which storage a tensor lies."""

    pickled: bytes
    offset_bytes: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Descriptor)


def new_shared(nbytes: int) -> torch.UntypedStorage:
    """Allocate a block of shared memory. Takes milliseconds for megabytes: not for the event loop.

    Raises:
        OSError: the machine has no room for it (ENOSPC).
    """
    try:
        storage: torch.UntypedStorage = torch.UntypedStorage._new_shared(nbytes)  # type: ignore[no-untyped-call]
        return storage
    except RuntimeError as error:
        raise OSError(
            errno.ENOSPC,
            f"no room for {nbytes} bytes of shared memory ({error}); lower arena_bytes, or give the machine "
            "or container a larger /dev/shm",
        ) from error


def _view(
    storage: torch.UntypedStorage, offset_bytes: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    nbytes = math.prod(shape) * dtype.itemsize
    raw = torch.empty(0, dtype=torch.uint8).set_(storage, offset_bytes, (nbytes,), (1,))
    return raw.view(dtype).view(shape)


def copy_to_shared(
    source: torch.Tensor, abandoned: threading.Event
) -> tuple[torch.UntypedStorage, torch.Tensor]:
    """Copy a tensor into a block of its own; see `copying.copy_exactly`."""
    storage = new_shared(source.nbytes)
    target = _view(storage, 0, source.dtype, tuple(source.shape))
    copy_exactly(source, target, abandoned)
    return storage, target


def name_shared(tensor: torch.Tensor) -> tuple[bytes, list[int]]:
    """Return what `open_shared` needs to find a contiguous tensor in shared memory: bytes and descriptors."""
    pickled, descriptors = with_descriptors.dumps(tensor.untyped_storage())
    offset_bytes = int(tensor.storage_offset()) * tensor.element_size()
    return _encoder.encode(_Descriptor(pickled, offset_bytes)), descriptors


def open_shared(
    payload: bytes, descriptors: Sequence[int], dtype: torch.dtype, shape: tuple[int, ...]
) -> tuple[torch.Tensor, torch.UntypedStorage]:
    """Return the tensor that `name_shared` named, and the storage that pins its block.

    Only for payloads of a trusted process: it unpickles.

    Raises:
        ProtocolError: the payload names no storage, or one too small for dtype and shape.
        OSError: this process has no room or no descriptors left to map it.
    """
    try:
        where = _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        with_descriptors.close(descriptors)
        raise ProtocolError(
            f"the peer described shared memory in a way that cannot be read: {error}"
        ) from error
    try:
        storage = with_descriptors.loads(where.pickled, descriptors)
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, TypeError, ValueError) as error:
        raise ProtocolError(f"the peer named shared memory that cannot be opened: {error}") from error
    except RuntimeError as error:
        raise OSError(errno.ENOMEM, f"cannot map shared memory that a sender shared: {error}") from error
    needed = math.prod(shape) * dtype.itemsize
    if not isinstance(storage, torch.UntypedStorage):
        raise ProtocolError(f"the peer named a {type(storage).__name__} where shared memory belongs")
    if where.offset_bytes % dtype.itemsize or not 0 <= where.offset_bytes <= storage.nbytes() - needed:
        raise ProtocolError(
            f"the peer placed a tensor of {needed} bytes at byte {where.offset_bytes} of a block of "
            f"{storage.nbytes()} bytes"
        )
    return _view(storage, where.offset_bytes, dtype, shape), storage


class _Allocation(NamedTuple):
    storage: "weakref.ref[torch.UntypedStorage]"
    block: int


class Allocations:
    """Know the blocks that callers allocated, so that sending one of them copies nothing.

    Args:
        on_freed: called with the block's number when its storage was freed, in whichever thread that
            happens, perhaps inside the garbage collector: it may only enqueue.
    """

    def __init__(self, on_freed: Callable[[int], None]) -> None:
        self._on_freed = on_freed
        self._by_address: dict[int, _Allocation] = {}

    def add(
        self, storage: torch.UntypedStorage, block: int, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> torch.Tensor:
        """Return the tensor over a new block, and watch for the end of its storage."""
        address = storage.data_ptr()
        self._by_address[address] = _Allocation(weakref.ref(storage), block)
        finalizer = weakref.finalize(storage, self._freed, address, block)
        finalizer.atexit = False  # at exit the kernel frees everything
        return _view(storage, 0, dtype, shape)

    def find(self, tensor: torch.Tensor) -> int | None:
        """Return the block of a contiguous tensor in allocated memory, or None if it must be copied."""
        if not self._by_address or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return None
        storage = tensor.untyped_storage()
        allocation = self._by_address.get(storage.data_ptr())
        if allocation is None or allocation.storage() is not storage:
            return None
        return allocation.block

    def _freed(self, address: int, block: int) -> None:
        found = self._by_address.get(address)
        if found is not None and found.block == block:
            del self._by_address[address]
        self._on_freed(block)
