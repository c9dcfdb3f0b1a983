"""Shared memory in the address space of this process.

The module `mmap` of Python keeps a duplicate of the descriptor of each mapping, calls ``madvise`` and
``munmap`` with the interpreter's lock held, and in a forked child unmaps whatever lies at those addresses by
then. This module calls the C library instead: a mapping needs no descriptor, other threads run while the
kernel works, and a forked child has neither the mapping nor a part in its end.
"""

import ctypes
import mmap
import os
import weakref

import numpy as np

__all__ = ["Mapping"]

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_munmap = _libc.munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_madvise = _libc.madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_FAILED = ctypes.c_void_p(-1).value
_MADV_POPULATE_WRITE = 23  # the module `mmap` of Python 3.11 has no name for it


class _MappedMemory:
    """What every view of a mapping refers to; the mapping ends with this object."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
        }


class Mapping:
    """Memory behind a descriptor, mapped for reading and writing and shared with other processes.

    Its views keep it mapped, also after `close`. A forked child does not have it: there, touching a view ends
    the process.

    Args:
        descriptor: of the memory; it stays the caller's, and is not needed any more.
        nbytes: the size of the memory.

    Raises:
        OSError: the memory cannot be mapped, for example because the process has no addresses left.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        flags, protection = mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE
        address = _mmap(None, nbytes, protection, flags, descriptor, 0)
        if address is None or address == _FAILED:
            raise _error()
        memory = _MappedMemory(address, nbytes)
        weakref.finalize(memory, _unmap, os.getpid(), address, nbytes).atexit = False
        self._address = address
        self.view: memoryview = np.asarray(memory).data
        self._advise(mmap.MADV_DONTFORK, 0, nbytes)

    def populate(self, start: int, length: int) -> None:
        """Map the pages of a range, so that the first write to each does not have to.

        Kernels before 5.14 cannot: there the pages are mapped when they are first written.
        """
        try:
            self._advise(_MADV_POPULATE_WRITE, start, length)
        except OSError:
            return

    def remove(self, start: int, length: int) -> None:
        """Return the memory of a range of pages to the system; it reads as zeros afterwards.

        Raises:
            OSError: the kernel refuses.
        """
        self._advise(mmap.MADV_REMOVE, start, length)

    def _advise(self, advice: int, start: int, length: int) -> None:
        view = self.view  # keeps the memory mapped during the call
        if _madvise(self._address + start, length, advice):
            raise _error()
        del view


def _unmap(pid: int, address: int, nbytes: int) -> None:
    # A forked child inherits the object, but not the memory: something else may be mapped there.
    if os.getpid() == pid:
        _munmap(address, nbytes)


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
