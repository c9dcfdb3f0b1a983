"""Faults that a process causes in itself, for a while or at once."""

import asyncio
import ctypes
import errno
import gc
import os
import random
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest.mock import patch

from aiotensor.memory import mapping
from verification.chaos.here import ARENA_BYTES
from verification.chaos.plan import FaultKind
from verification.processes.peers import State


async def suffer(state: State, kind: FaultKind, for_s: float, seed: int) -> None:
    """Cause a fault for a while."""
    with _WINDOWS[kind](random.Random(seed)):
        await asyncio.sleep(for_s)


def _no_space(rng: random.Random) -> AbstractContextManager[object]:
    # By hand: a memfd lies on a mount of the kernel's that has no size; strict overcommit is a setting of the
    # whole machine, and a memory cgroup at its limit kills instead of returning an error.
    real, number = os.posix_fallocate, rng.choice((errno.ENOSPC, errno.ENOMEM))

    def refuse(descriptor: int, offset: int, length: int, /) -> None:
        if rng.random() < 0.5:
            raise OSError(number, os.strerror(number))
        real(descriptor, offset, length)

    return patch.object(os, "posix_fallocate", refuse)


@contextmanager
def _limited(which: int, limit: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(which)
    resource.setrlimit(which, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(which, (soft, hard))


def _small_files(rng: random.Random) -> AbstractContextManager[None]:
    """Limit the size of files to less than a segment; the journal is smaller."""
    return _limited(resource.RLIMIT_FSIZE, ARENA_BYTES - 1)


def _no_addresses(rng: random.Random) -> AbstractContextManager[object]:
    # By hand: a limit on addresses (RLIMIT_AS) hits the interpreter first; a thread that cannot allocate in
    # its first steps leaves `Thread.start` waiting for ever.
    def refuse(*_: object) -> int | None:
        ctypes.set_errno(errno.ENOMEM)
        return mapping._FAILED

    return patch.object(mapping, "_mmap", refuse)


def _no_descriptors(rng: random.Random) -> AbstractContextManager[None]:
    """Allow no more descriptors than are open."""
    lowest_free = os.dup(0)
    os.close(lowest_free)
    return _limited(resource.RLIMIT_NOFILE, lowest_free)


@contextmanager
def _collecting(rng: random.Random) -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        yield
    finally:
        gc.set_threshold(*before)


_WINDOWS: dict[FaultKind, Callable[[random.Random], AbstractContextManager[object]]] = {
    FaultKind.NO_SPACE: _no_space,
    FaultKind.FILE_SIZE: _small_files,
    FaultKind.NO_ADDRESSES: _no_addresses,
    FaultKind.NO_DESCRIPTORS: _no_descriptors,
    FaultKind.COLLECT: _collecting,
}
