"""Tokens: the kernel reports when other processes have unmapped a segment or have ended.

A token is the writing end of a pipe, which a process keeps as long as it has mapped a segment. Even if the
process is killed, the token is closed then, and the reading end reports the end of the pipe.

- The owner of a segment keeps one, and sends the reading end to each reader: after the end of the owner, the
  readers return unused memory to the system.
- The owner sends another one to each reader, and keeps the reading end: as long as a lost reader has the
  segment, its blocks are not used again.

A reader that forwards blocks of the segment sends the token and the reading end on.
"""

import asyncio
import os
from collections.abc import Callable

from aiotensor.runtime.descriptors import Descriptor

__all__ = ["TokenEnd", "new_token"]


def new_token() -> tuple[Descriptor, Descriptor]:
    """Return the reading end of a new pipe, and the token.

    Raises:
        OSError: this process has no descriptors left.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    return Descriptor(reading), Descriptor(writing)


class TokenEnd:
    """Call a function once all copies of a token are closed; belongs to the running loop.

    Args:
        reading: the reading end of the pipe of the token, which no other object of this class uses.
        ended: the function, which is called in the loop.

    Attributes:
        ended: the second argument.
    """

    def __init__(self, reading: Descriptor, ended: Callable[[], object]) -> None:
        self.ended = ended
        self._reading: Descriptor | None = reading
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(reading.number, self._has_ended)

    def cancel(self) -> None:
        """Stop waiting; may be called again."""
        if self._reading is not None:
            self._loop.remove_reader(self._reading.number)
            # So that it is closed, unless another object needs it. The function often refers to the object
            # that has both, and such a cycle would keep the descriptor until a garbage collection.
            self._reading, self.ended = None, _ignore

    def _has_ended(self) -> None:
        ended = self.ended
        self.cancel()
        ended()


def _ignore() -> None: ...
