"""Read an upload in a thread while it arrives."""

import asyncio
import io
import os
import tempfile
from collections.abc import AsyncIterator

import anyio
import anyio.from_thread

from aiotensor import TooLargeError

MAX_UPLOAD_BYTES = int(os.environ.get("MAX_UPLOAD_BYTES", 1 << 30))
_MAX_BYTES_IN_MEMORY = 1 << 20


class Upload:
    """A file that a decoder reads while it arrives, in a thread of anyio.

    The received bytes are kept in a temporary file, since a decoder may read parts of the file again, or the
    index at its end first. Keep the folder for temporary files on a disk, not in memory.

    An upload of unknown size (``Transfer-Encoding: chunked``) is not seekable: a decoder would seek to its
    end at once, and then wait for the whole upload before the first frame. So a file whose index is at the
    end needs a ``Content-Length``.

    Args:
        chunks: the chunks of the file, in order; nothing is read before the decoder asks for it.
        size: the size of the file in bytes; None if it is unknown.

    Raises:
        TooLargeError: the size exceeds `MAX_UPLOAD_BYTES`. Servers answer with 413. If the size is unknown,
            `failure` is this error as soon as more bytes arrive.
    """

    def __init__(self, chunks: AsyncIterator[bytes], size: int | None) -> None:
        if size is not None and size > MAX_UPLOAD_BYTES:
            raise _too_large(size)
        self.failure: Exception | None = None  # such as a client that disconnected
        self._chunks = chunks
        self._size = size
        self._file = tempfile.SpooledTemporaryFile(_MAX_BYTES_IN_MEMORY)  # noqa: SIM115 - see `close`
        self._received = self._position = 0
        self._has_ended = self._is_given_up = False
        self._waiting: anyio.CancelScope | None = None

    def read(self, size: int) -> bytes:
        """Return at most `size` bytes; none at the end, and after a failure. Blocks until there are some."""
        while self._received <= self._position and not self._has_ended:
            self._receive()
        if self._is_given_up:
            return b""
        self._file.seek(self._position)
        part = self._file.read(size)
        self._position += len(part)
        return part

    def seekable(self) -> bool:
        """Return whether the size is known."""
        return self._size is not None

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position, which may be beyond the received bytes; reading there waits for them."""
        if whence == os.SEEK_CUR:
            offset += self._position
        elif whence == os.SEEK_END:
            if self._size is None:
                raise io.UnsupportedOperation("the size of this upload is unknown")
            offset += self._size
        self._position = max(offset, 0)
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def give_up(self) -> None:
        """End the file here, and the wait of its reader; on the event loop."""
        self._is_given_up = True
        if self._waiting is not None:
            self._waiting.cancel()

    def close(self) -> None:
        """Delete the temporary file."""
        self._file.close()

    def _receive(self) -> None:
        chunk = anyio.from_thread.run(self._next_chunk)
        if chunk is not None and self._received + len(chunk) > MAX_UPLOAD_BYTES:
            self.failure, chunk = _too_large(self._received + len(chunk)), None
        if chunk is None:
            self._has_ended = True
        else:
            self._file.seek(self._received)
            self._file.write(chunk)
            self._received += len(chunk)

    async def _next_chunk(self) -> bytes | None:
        """Wait for the next chunk; return None at the end, after an error, and when cancelled.

        This raises no error: libav could not pass it on, and an error that anyio raises in a thread refers to
        itself, so that the frames in its traceback would stay in memory until the garbage collector runs.
        """
        try:
            if not self._is_given_up:
                with anyio.CancelScope() as self._waiting:
                    return await anext(self._chunks, None)
        except asyncio.CancelledError:
            pass  # the task that waits for the thread is cancelled, too
        except Exception as error:  # noqa: BLE001 - the decoder raises it on the event loop
            self.failure = error
        return None


def _too_large(size: int) -> TooLargeError:
    return TooLargeError(
        f"an upload has at most {MAX_UPLOAD_BYTES} bytes, and this one has {size} or more",
        limit=MAX_UPLOAD_BYTES,
        requested=size,
    )
