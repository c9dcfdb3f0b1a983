"""The end of another process, as the kernel reports it."""

import asyncio
import os
from collections.abc import Callable
from typing import TypeAlias

from aiotensor.runtime.descriptors import Descriptor

__all__ = ["ProcessEnd", "WatchProcess"]


class ProcessEnd:
    """Call a function once another process has ended; belongs to the running loop.

    If the end cannot be detected (before Linux 5.3, or with no descriptors left), the function is never
    called.

    Args:
        pid: the id of the process.
        ended: the function, which is called in the loop.
        open_descriptor: returns a descriptor of the process; raises `ProcessLookupError` if it has ended.
    """

    def __init__(
        self,
        pid: int,
        ended: Callable[[], object],
        open_descriptor: Callable[[int], int] = os.pidfd_open,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = ended
        self._descriptor = Descriptor(-1)
        self._soon: asyncio.Handle | None = None
        try:
            self._descriptor = Descriptor(open_descriptor(pid))
        except ProcessLookupError:
            self._soon = self._loop.call_soon(ended)
        except OSError:
            return
        else:
            self._loop.add_reader(self._descriptor.number, self._has_ended)

    def cancel(self) -> None:
        """Stop waiting for the end of the process; may be called again."""
        if self._soon is not None:
            self._soon.cancel()
        if self._descriptor.number >= 0:
            self._loop.remove_reader(self._descriptor.number)
            self._descriptor.close()

    def _has_ended(self) -> None:
        self.cancel()
        self._ended()


# Arranges that a function is called once a certain process has ended.
WatchProcess: TypeAlias = Callable[[Callable[[], object]], ProcessEnd]
