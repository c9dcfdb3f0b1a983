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

__all__ = [
    "Allocations",
    "Block",
    "CopyAbandonedError",
    "Shared",
    "copy_to_memfd",
    "new_shared",
    "open_memfd",
]

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


class Block(NamedTuple):
    """Shared memory that was allocated: its storage, and the descriptor to send, closed with the storage."""

    storage: torch.UntypedStorage
    descriptor: int


def new_shared(nbytes: int) -> Block:
    """Allocate a block, its pages all there. Not for the event loop.

    Raises:
        OSError: the machine has no memory (ENOSPC, ENOMEM) or no descriptors (EMFILE) left.
    """
    descriptor = _new_memfd(nbytes)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        storage = _map(descriptor, nbytes).untyped_storage()
    except BaseException:
        os.close(descriptor)
        raise
    weakref.finalize(storage, os.close, descriptor).atexit = False
    return Block(storage, descriptor)


def open_memfd(
    payload: bytes, descriptors: Sequence[int], dtype: torch.dtype, shape: tuple[int, ...]
) -> tuple[torch.Tensor, torch.UntypedStorage]:
    """Map a tensor that was sent; its mapping ends with its storage, which is returned too.

    Uses the descriptors up, whatever happens: a mapping needs none.

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
        raw = _map(descriptors[0], size)
    except msgspec.MsgspecError as error:
        raise ProtocolError(
            f"the peer described shared memory in a way that cannot be read: {error}"
        ) from error
    finally:
        close_all(descriptors)
    return raw[offset : offset + needed].view(dtype).view(shape), raw.untyped_storage()


def _map(descriptor: int, nbytes: int) -> torch.Tensor:
    """Map a memfd of at least this size, as a tensor of bytes that keeps no descriptor."""
    mmap.mmap(descriptor, nbytes).close()  # torch leaves a descriptor open where mapping fails
    try:
        return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(errno.ENOMEM, f"shared memory cannot be mapped: {error}") from error


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
    descriptor: int
    number: int


class Allocations:
    """Know the blocks that callers allocated, so that sending one of them copies nothing.

    Args:
        on_freed: called with the block's number when its storage was freed, in whichever thread that
            happens, perhaps inside the garbage collector: it may only enqueue.
    """

    def __init__(self, on_freed: Callable[[int], None]) -> None:
        self._on_freed = on_freed
        self._by_address: dict[int, _Allocation] = {}

    def add(self, block: Block, number: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor over a new block, and watch for the end of its storage."""
        storage = block.storage
        address = storage.data_ptr()
        self._by_address[address] = _Allocation(weakref.ref(storage), block.descriptor, number)
        weakref.finalize(storage, self._freed, address, number).atexit = False
        raw = torch.empty(0, dtype=torch.uint8).set_(storage)
        return raw.view(dtype).view(shape)

    def find(self, tensor: torch.Tensor) -> int | None:
        """Return the number of a contiguous tensor's block, or None if the tensor must be copied."""
        if not self._by_address or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return None
        allocation = self._of(tensor)
        return None if allocation is None else allocation.number

    def share(self, tensor: torch.Tensor) -> Shared:
        """Name a tensor that was found for the receiver."""
        allocation = self._of(tensor)
        if allocation is None:
            raise AssertionError("a storage that a living tensor has was freed")
        offset_bytes = int(tensor.storage_offset()) * tensor.element_size()
        return Shared(_encoder.encode(_Descriptor(offset_bytes)), os.dup(allocation.descriptor))

    def _of(self, tensor: torch.Tensor) -> _Allocation | None:
        storage = tensor.untyped_storage()
        allocation = self._by_address.get(storage.data_ptr())
        return allocation if allocation is not None and allocation.storage() is storage else None

    def _freed(self, address: int, number: int) -> None:
        found = self._by_address.get(address)
        if found is not None and found.number == number:
            del self._by_address[address]
        self._on_freed(number)
