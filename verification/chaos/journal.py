"""The journal of a process: a record of its operations, which survives `kill -9`."""

import os
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from aiotensor import TensorHandle

Key: TypeAlias = tuple[str, int, int]  # of a tensor: its sender, its message, and its number in that


class Began(msgspec.Struct, tag=True, frozen=True):
    """A message is about to be sent."""

    key: int


class Sent(msgspec.Struct, tag=True, frozen=True):
    """A tensor has got its handle, after a number of losses of its sender's receivers."""

    token: int
    handle: Key
    losses: int


class Ended(msgspec.Struct, tag=True, frozen=True):
    """Sending a message ended: with "whole", or with the name of an error."""

    key: int
    how: str
    text: str = ""


class Taken(msgspec.Struct, tag=True, frozen=True):
    """A tensor was received, with the pattern of this token, under this handle."""

    token: int
    handle: Key


class Answered(msgspec.Struct, tag=True, frozen=True):
    """At the end, a request for a handle raised this error."""

    handle: Key
    error: str


class Heard(msgspec.Struct, tag=True, frozen=True):
    """A server has taken the question with this key, and its tensors had the right values."""

    key: int


class AnswerSent(msgspec.Struct, tag=True, frozen=True):
    """A server has answered the question with this key, while its client waited for the answer."""

    key: int


class Published(msgspec.Struct, tag=True, frozen=True):
    """The publication with this key has got its number."""

    key: int
    publisher: str
    number: int


class Subscribed(msgspec.Struct, tag=True, frozen=True):
    """A subscriber is about to open."""


class Received(msgspec.Struct, tag=True, frozen=True):
    """A subscriber has received the publication with this key, with the right values."""

    key: int
    publisher: str
    number: int
    missed: int


class Disconnected(msgspec.Struct, tag=True, frozen=True):
    """A call of a subscriber raised this error; "" at the clean end of its publisher."""

    error: str
    text: str = ""


class Broken(msgspec.Struct, tag=True, frozen=True):
    """The process itself detected an error."""

    text: str


_OfTensors: TypeAlias = Sent | Taken | Answered
_OfRequests: TypeAlias = AnswerSent | Heard
_OfBroadcasts: TypeAlias = Published | Subscribed | Received | Disconnected
Event: TypeAlias = Began | Ended | Broken | _OfTensors | _OfRequests | _OfBroadcasts

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Event).decode


class Journal:
    """Write events to a file, each in one system call, so that a kill neither loses nor truncates one.

    Args:
        path: the path of the file.
    """

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def __call__(self, event: Event) -> None:
        os.write(self._file, _encode(event) + b"\n")

    def begin_anew(self) -> None:
        """Forget the last round."""
        os.ftruncate(self._file, 0)


def key_of(handle: TensorHandle) -> Key:
    """Return what identifies a tensor."""
    return handle.sender, handle.message, handle.tensor


def read(path: str) -> Sequence[Event]:
    """Return the events of a journal."""
    with open(path, "rb") as file:
        return [_decode(line) for line in file]
