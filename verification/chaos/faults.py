"""Faults that a process causes in itself, for a while or at once."""

import asyncio
import ctypes
import errno
import gc
import os
import random
import resource
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from aiotensor import TensorHandle, UsageError
from aiotensor.memory import mapping
from verification.chaos.here import ARENA_BYTES, here
from verification.chaos.plan import FaultKind
from verification.patterns import pattern
from verification.processes.peers import State

__all__ = ["fork", "fork_and_linger", "suffer"]

_DAY_S = 86_400.0
_LONGEST_JUMP_S = 60.0


async def suffer(state: State, kind: FaultKind, for_s: float, seed: int) -> None:
    """Cause a fault for a while."""
    del state
    with _WINDOWS[kind](random.Random(seed)):
        await asyncio.sleep(for_s)


@contextmanager
def _no_space(rng: random.Random) -> Iterator[None]:
    # By hand: a memfd lies on a mount of the kernel's that has no size; strict overcommit is a setting of the
    # whole machine, and a memory cgroup at its limit kills instead of returning an error.
    real, number = os.posix_fallocate, rng.choice((errno.ENOSPC, errno.ENOMEM))

    def refuse(descriptor: int, offset: int, length: int, /) -> None:
        if rng.random() < 0.5:
            raise OSError(number, os.strerror(number))
        real(descriptor, offset, length)

    os.posix_fallocate = refuse
    try:
        yield
    finally:
        os.posix_fallocate = real


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


@contextmanager
def _no_addresses(rng: random.Random) -> Iterator[None]:
    # By hand: a limit on addresses (RLIMIT_AS) hits the interpreter first; a thread that cannot allocate in
    # its first steps leaves `Thread.start` waiting for ever.
    real = mapping._mmap

    def refuse(*_: object) -> int | None:
        ctypes.set_errno(errno.ENOMEM)
        return mapping._FAILED

    mapping._mmap = refuse  # type: ignore[assignment]
    try:
        yield
    finally:
        mapping._mmap = real


def _no_descriptors(rng: random.Random) -> AbstractContextManager[None]:
    """Allow no more descriptors than are open."""
    lowest_free = os.dup(0)
    os.close(lowest_free)
    return _limited(resource.RLIMIT_NOFILE, lowest_free)


@contextmanager
def _jumping_clock(rng: random.Random) -> Iterator[None]:
    """Set the wall clock to another day for a while, and the loop's clock forward, as after a suspend."""
    real, day = time.time, rng.choice((-_DAY_S, _DAY_S))
    time.time = lambda: real() + day
    here.jumped_s += rng.uniform(1, _LONGEST_JUMP_S)
    try:
        yield
    finally:
        time.time = real


@contextmanager
def _collecting(rng: random.Random) -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(1)
    here.collects_in_finalizers = True
    try:
        yield
    finally:
        here.collects_in_finalizers = False
        gc.set_threshold(*before)


_WINDOWS: dict[FaultKind, Callable[[random.Random], AbstractContextManager[None]]] = {
    FaultKind.NO_SPACE: _no_space,
    FaultKind.FILE_SIZE: _small_files,
    FaultKind.NO_ADDRESSES: _no_addresses,
    FaultKind.NO_DESCRIPTORS: _no_descriptors,
    FaultKind.CLOCK: _jumping_clock,
    FaultKind.COLLECT: _collecting,
}


async def fork(state: State) -> int:
    """Fork; the child uses every open end, and exits. Return its status: 0 if each use was rejected."""
    child = _fork(state)
    if child == 0:
        os._exit(_touch_all(state))
    _, status = await asyncio.to_thread(os.waitpid, child, 0)
    return os.waitstatus_to_exitcode(status)


async def fork_and_linger(state: State) -> int:
    """Fork, and return the pid of the child, which lives until it is killed."""
    child = _fork(state)
    if child == 0:
        while True:
            signal.pause()
    return child


def _fork(state: State) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is the purpose
        return os.fork()


def _touch_all(state: State) -> int:
    """Use every end as only its own process may, and count the uses that did not raise `UsageError`."""
    handle = TensorHandle("0" * 32, 0, 0, "int64", (1,), "cpu")
    uses: list[Callable[[], object]] = []
    for sender in state.senders:
        uses += [
            partial(sender.send_nowait, pattern(0, 3)),
            partial(sender.discard, handle),
            sender.statistics,
        ]
    for receiver in state.receivers:
        uses += [partial(receiver.receive_nowait, handle), partial(receiver.discard, handle)]
        uses.append(receiver.statistics)
    uses += here.uses
    went_on = 0
    for use in uses:
        try:
            use()
        except UsageError:
            continue
        except BaseException:  # noqa: BLE001 - the child must never return into the parent's loop
            went_on += 1
        else:
            went_on += 1
    return went_on
