"""Tensors in anonymous shared memory: a sealed memfd for each, passed along as a descriptor.

A memfd has no name, so nothing is left behind whoever is killed when, and the size of ``/dev/shm`` does
not matter. torch's own shared memory is made under a name first, which stays in ``/dev/shm`` if the
process dies before it is taken away.
"""

import errno
import fcntl
import math
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

import msgspec
import torch

from aiotensor.descriptors import close_all
from aiotensor.errors import ProtocolError
from aiotensor.placements.raw import pieces

__all__ = ["Allocations", "CopyAbandonedError", "Shared", "copy_to_memfd", "new_shared", "open_memfd"]

# The size is final before anybody else maps it, so nobody can turn a read into SIGBUS by shrinking it.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class CopyAbandonedError(Exception):
    """Nobody wants the copy any more."""


class _Descriptor(msgspec.Struct, frozen=True, array_like=True):
    """Say where in its block a tensor begins."""

    offset_bytes: Annotated[int, msgspec.Meta(ge=0)]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Descriptor)


class Shared(NamedTuple):
    """Where a tensor is: the payload of its frame, and the descriptor of its block."""

    payload: bytes
    descriptor: int


def copy_to_memfd(source: torch.Tensor, abandoned: threading.Event) -> Shared:
    """Copy a tensor into a block of its own.

    The bytes are written, not mapped: the kernel then fills each fresh page once, without zeroing it
    first and without a page fault.

    Args:
        source: what to copy.
        abandoned: looked at between pieces of some megabytes.

    Raises:
        CopyAbandonedError: `abandoned` was set before the copy was complete.
        OSError: the machine has no memory (ENOSPC, ENOMEM) or no descriptors (EMFILE) left.
    """
    descriptor = _new_memfd(source.nbytes)
    try:
        offset = 0
        for piece in pieces(source):
            unwritten = piece.data
            while unwritten:
                if abandoned.is_set():
                    raise CopyAbandonedError
                written = os.pwrite(descriptor, unwritten, offset)
                unwritten = unwritten[written:]
                offset += written
    except BaseException:
        os.close(descriptor)
        raise
    return Shared(_encoder.encode(_Descriptor(0)), descriptor)


def new_shared(nbytes: int) -> torch.UntypedStorage:
    """Allocate a block as torch storage, its pages all there. Not for the event loop.

    Raises:
        OSError: the machine has no memory (ENOSPC, ENOMEM) or no descriptors (EMFILE) left.
    """
    descriptor = _new_memfd(nbytes)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        # The way torch.multiprocessing maps what it was sent; it keeps a descriptor of its own.
        storage: torch.UntypedStorage = torch.UntypedStorage._new_shared_fd_cpu(  # type: ignore[attr-defined]
            descriptor, nbytes
        )
    finally:
        os.close(descriptor)
    return storage


def open_memfd(
    payload: bytes, descriptors: Sequence[int], dtype: torch.dtype, shape: tuple[int, ...]
) -> tuple[torch.Tensor, mmap.mmap]:
    """Map a tensor that was sent; its mapping ends when its storage is freed.

    Uses the descriptors up, whatever happens.

    Raises:
        ProtocolError: they are not one sealed memfd that is large enough for dtype and shape.
        OSError: this process has no room or no descriptors left to map it.
    """
    try:
        if not descriptors:
            raise OSError(errno.EMFILE, "its descriptor did not arrive: none are left here (ulimit -n)")
        offset = _decoder.decode(payload).offset_bytes
        needed = math.prod(shape) * dtype.itemsize
        size = os.fstat(descriptors[0]).st_size
        if not needed or offset % dtype.itemsize or offset + needed > size:
            raise ProtocolError(
                f"the peer placed a tensor of {needed} bytes at byte {offset} of a block of {size} bytes"
            )
        if not _is_sealed(descriptors[0]):
            raise ProtocolError("the peer shared memory that could shrink while it is read")
        mapping = mmap.mmap(descriptors[0], size)
    except msgspec.MsgspecError as error:
        raise ProtocolError(
            f"the peer described shared memory in a way that cannot be read: {error}"
        ) from error
    finally:
        close_all(descriptors)
    # The tensor's storage holds the mapping object, and nobody else does.
    raw = torch.frombuffer(mapping, dtype=torch.uint8, count=needed, offset=offset)
    return raw.view(dtype).view(shape), mapping


def _new_memfd(nbytes: int) -> int:
    descriptor = os.memfd_create("aiotensor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _is_sealed(descriptor: int) -> bool:
    try:
        return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False  # it is no memfd at all


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
        raw = torch.empty(0, dtype=torch.uint8).set_(storage)
        return raw.view(dtype).view(shape)

    def find(self, tensor: torch.Tensor) -> int | None:
        """Return the block of a contiguous tensor in allocated memory, or None if it must be copied."""
        if not self._by_address or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return None
        storage = tensor.untyped_storage()
        allocation = self._by_address.get(storage.data_ptr())
        if allocation is None or allocation.storage() is not storage:
            return None
        return allocation.block

    def share(self, tensor: torch.Tensor) -> Shared:
        """Name an allocated tensor for the receiver."""
        descriptor, _ = tensor.untyped_storage()._share_fd_cpu_()
        offset_bytes = int(tensor.storage_offset()) * tensor.element_size()
        return Shared(_encoder.encode(_Descriptor(offset_bytes)), os.dup(descriptor))

    def _freed(self, address: int, block: int) -> None:
        found = self._by_address.get(address)
        if found is not None and found.block == block:
            del self._by_address[address]
        self._on_freed(block)
