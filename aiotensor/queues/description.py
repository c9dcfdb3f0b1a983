"""The common base of the asynchronous and the blocking `MessageQueue`: settings, pickling and the folder."""

import os
import shutil
import tempfile
from multiprocessing import util
from types import TracebackType
from typing import Any, Generic, Self, TypedDict, TypeVar

from aiotensor.codec import TensorDecoder
from aiotensor.queues.folder import Folder
from aiotensor.queues.settings import QueueSettings
from aiotensor.runtime.arguments import count, count_or_none, grace_period

__all__ = ["QueueDescription"]

M = TypeVar("M")

# `multiprocessing` runs finalizers of a negative priority after it has joined the child processes, which may
# still use the queue.
_AFTER_CHILDREN = -100


class QueueOptions(TypedDict, total=False):
    """The keyword arguments of a `MessageQueue`."""

    producers: int
    consumers: int
    max_messages: int
    arena_bytes: int
    max_body_bytes: int | None
    redeliver: bool
    grace_s: float | None
    folder: str | os.PathLike[str] | None


class QueueDescription(Generic[M]):
    """The base of queues; see `aiotensor.queues.MessageQueue`."""

    def __init__(
        self,
        message_type: Any,
        *,
        producers: int = 1,
        consumers: int = 1,
        max_messages: int = 8,
        arena_bytes: int = 1 << 30,
        max_body_bytes: int | None = 1 << 20,
        redeliver: bool = True,
        grace_s: float | None = 30.0,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        if isinstance(message_type, int):
            raise TypeError(
                "the first argument of MessageQueue is the type of the messages: pass the capacity as "
                f"max_messages={message_type}"
            )
        TensorDecoder(message_type)  # raises the error of an invalid type here, and not in a consumer
        producers = count("producers", producers)
        consumers = count("consumers", consumers)
        max_messages = count("max_messages", max_messages)
        arena_bytes = count("arena_bytes", arena_bytes)
        max_body_bytes = count_or_none("max_body_bytes", max_body_bytes)
        grace_s = grace_period(grace_s)
        is_private = folder is None
        path = tempfile.mkdtemp(prefix="aiotensor-") if folder is None else _absolute(folder)
        place = Folder(path, producers, consumers, is_private)
        try:
            place.create()
            owner = place.own() if is_private else None
        except BaseException:
            if is_private:
                shutil.rmtree(path, ignore_errors=True)
            raise
        self._settings = QueueSettings(
            place, message_type, max_messages, arena_bytes, max_body_bytes, redeliver, grace_s
        )
        self._pid = os.getpid()
        # Not at the end of this object: children that were just started may not have opened anything yet.
        self._close = (
            util.Finalize(None, place.close, args=(owner,), exitpriority=_AFTER_CHILDREN) if owner else None
        )

    def __getstate__(self) -> QueueSettings:
        return self._settings

    def __setstate__(self, settings: QueueSettings) -> None:
        self._settings = settings
        self._pid = 0  # of no process: only the queue that has made the folder removes it
        self._close = None

    def __repr__(self) -> str:
        folder = self._settings.folder
        return f"<{type(self).__name__} in {folder.path}, {folder.numbers}>"

    def close(self) -> None:
        """Remove the files of the queue, once no producer or consumer of any process is open.

        Afterwards no further producer or consumer can open. In processes that have inherited or unpickled the
        queue, the call leaves the files. The queue of a private folder is closed at the end of the process
        that has created it, after `multiprocessing` has joined its children. Closing again has no effect.
        """
        if self._pid == os.getpid():
            if self._close is None:
                self._settings.folder.close(None)
            else:
                self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _absolute(folder: str | os.PathLike[str]) -> str:
    if not os.path.isabs(folder):
        raise ValueError(
            f"the folder {os.fspath(folder)!r} of a queue must be an absolute path, such as "
            "/run/user/1000/frames: its processes may have different working directories"
        )
    return os.path.normpath(folder)
