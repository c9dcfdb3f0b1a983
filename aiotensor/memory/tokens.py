"""Tokens: the kernel reports when the last process that could read a segment has unmapped it or has ended.

A token is the writing end of a pipe. It is sent with the descriptor of a segment, and the reader keeps it as
long as the segment is mapped. A reader that forwards blocks of the segment sends the token on. So the last
copy of the token is closed with the last mapping, even if these processes are killed, and the reading end
then reports the end of the pipe to the process that made it.
"""

import asyncio
import os
from collections.abc import Callable

from aiotensor.runtime.descriptors import Descriptor

__all__ = ["ReadersEnd", "new_token"]


def new_token() -> tuple[Descriptor, Descriptor]:
    """Return the reading end of a new pipe, and the token.

    Raises:
        OSError: this process has no descriptors left.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    return Descriptor(reading), Descriptor(writing)


class ReadersEnd:
    """Call a function once all copies of a token are closed; belongs to the running loop.

    Args:
        reading: the reading end of the pipe of the token, which no other object of this class uses.
        ended: the function, which is called in the loop.

    Attributes:
        ended: the second argument.
    """

    def __init__(self, reading: Descriptor, ended: Callable[[], object]) -> None:
        self.ended = ended
        self._reading = reading
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(reading.number, self._has_ended)

    def cancel(self) -> None:
        """Stop waiting; may be called again."""
        if self._reading.number >= 0:
            self._loop.remove_reader(self._reading.number)
            self._reading.close()

    def _has_ended(self) -> None:
        self.cancel()
        self.ended()
