"""The end of another process, as the kernel reports it."""

import asyncio
import os
from collections.abc import Callable

from aiotensor.runtime.descriptors import Descriptor

__all__ = ["ProcessEnd"]


class ProcessEnd:
    """Call a function once another process has ended; belongs to the running loop.

    Where the kernel cannot tell (before Linux 5.3, or with no descriptors left), it is never called.
    """

    def __init__(self, pid: int, ended: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = ended
        self._descriptor = Descriptor(-1)
        self._soon: asyncio.Handle | None = None
        try:
            self._descriptor = Descriptor(os.pidfd_open(pid))
        except ProcessLookupError:
            self._soon = self._loop.call_soon(ended)
        except OSError:
            return
        else:
            self._loop.add_reader(self._descriptor.number, self._has_ended)

    def cancel(self) -> None:
        """Wait no longer. May be called again."""
        if self._soon is not None:
            self._soon.cancel()
        if self._descriptor.number >= 0:
            self._loop.remove_reader(self._descriptor.number)
            self._descriptor.close()

    def _has_ended(self) -> None:
        self.cancel()
        self._ended()
