"""Pickle with file descriptors beside the bytes, for whoever carries descriptors by other means.

While a process is being spawned, multiprocessing lets the spawning code decide how a descriptor reaches
the child. The same hook serves here: descriptors are duplicated into a list, the pickle holds their
places in it, and the link passes the list through the kernel. The stock way for a running process is a
background thread that hands descriptors out on request over a named socket; it costs a round trip for
each one, hangs on a stopped sender, and what it holds is lost when the sender exits.
"""

import errno
import os
import pickle
import threading
from collections.abc import Iterable, Sequence
from multiprocessing import context, reduction

__all__ = ["close", "dumps", "loads"]

_opening = threading.local()


class _Place:
    """Stand in a pickle for one descriptor of the list beside it."""

    def __init__(self, index: int) -> None:
        self.index = index

    def detach(self) -> int:
        """Return the descriptor, which then belongs to the caller."""
        descriptors: list[int | None] = _opening.descriptors
        if not 0 <= self.index < len(descriptors):
            raise OSError(errno.EMFILE, "a descriptor did not arrive: this process has none left (ulimit -n)")
        descriptor = descriptors[self.index]
        if descriptor is None:
            raise pickle.UnpicklingError(f"descriptor {self.index} is named twice")
        descriptors[self.index] = None
        return descriptor


class _Collector:
    """Collect duplicates of the descriptors that a pickle names; looks to multiprocessing like a spawn."""

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def duplicate_for_child(self, descriptor: int) -> int:
        self.descriptors.append(os.dup(descriptor))
        return len(self.descriptors) - 1

    def DupFd(self, index: int) -> _Place:  # noqa: N802 - the name is multiprocessing's
        return _Place(index)


def close(descriptors: Iterable[int]) -> None:
    """Close descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)


def dumps(value: object) -> tuple[bytes, list[int]]:
    """Pickle a value; return the bytes and the descriptors that they name, which belong to the caller."""
    collector = _Collector()
    context.set_spawning_popen(collector)  # type: ignore[arg-type]
    try:
        return bytes(reduction.ForkingPickler.dumps(value)), collector.descriptors
    except BaseException:
        close(collector.descriptors)
        raise
    finally:
        context.set_spawning_popen(None)


def loads(data: bytes, descriptors: Sequence[int]) -> object:
    """Unpickle what `dumps` made; the descriptors are closed or belong to the value afterwards."""
    pending: list[int | None] = list(descriptors)
    _opening.descriptors = pending
    try:
        return pickle.loads(data)  # noqa: S301 - from trusted children only, see links.queue
    finally:
        del _opening.descriptors
        close(descriptor for descriptor in pending if descriptor is not None)
