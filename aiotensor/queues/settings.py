"""The settings of a queue, which its processes share."""

from typing import Any, NamedTuple

from aiotensor.queues.folder import Folder

__all__ = ["QueueSettings"]


class QueueSettings(NamedTuple):
    """The arguments of a `MessageQueue`, and its folder."""

    folder: Folder
    message_type: Any
    max_messages: int
    arena_bytes: int
    max_body_bytes: int | None
    redeliver: bool
    grace_s: float | None
