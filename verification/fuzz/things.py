"""The descriptors that a rogue sends: valid memory, invalid memory, and other files."""

import contextlib
import fcntl
import os
import socket
import struct
import tempfile
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import msgspec
import numpy as np

from aiotensor.codec.placeholders import TENSOR

__all__ = [
    "CONTENT",
    "GUARD",
    "IMAGE",
    "LOOSE_NAME",
    "MEMORY_KINDS",
    "MEMORY_NAME",
    "OTHER_THINGS",
    "SEGMENT_BYTES",
    "WHERE",
    "Things",
]

MEMORY_NAME = "fuzz"  # as the kernel lists it, behind "memfd:"; memory named "loose" must never be mapped
LOOSE_NAME = "loose"

# The bytes of a rogue's memory, by offset: no two windows of a few bytes are equal.
_OFFSETS = np.arange(1 << 16, dtype=np.uint32)
GUARD = ((_OFFSETS * 2654435761) >> 13).astype(np.uint8).tobytes()

SEGMENT_BYTES = (4096, 8192, 65536)

WHERE = struct.Struct("<QQ")  # a position: the number of a segment, and the offset in it

# The first bytes of the memory called "content": the content of a publication, with a tensor in segment 0.
_encode = msgspec.msgpack.encode
CONTENT = _encode(
    [
        _encode({"number": 1, "tensors": [msgspec.msgpack.Ext(TENSOR, _encode(["at", 0]))]}),
        [["uint8", [64], "arena", WHERE.pack(0, 1024), 99]],
    ]
)

IMAGE = CONTENT + GUARD[len(CONTENT) :]  # the bytes of that memory

# Segments must be sealed; memory that others may write to, or that may only grow, is accepted too.
MEMORY_KINDS = ("sealed", "unsealed", "read-only", "write-sealed", "growable", "content", "huge", "device")
OTHER_THINGS = ("pipe", "directory", "file", "socket", "listener")

_GROWABLE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_SEALED = _GROWABLE | fcntl.F_SEAL_GROW
_HUGE_BYTES = 2 << 20

_RENEWED = "sealed", "growable", "content"
_AT_ONCE = 9  # of one name in a record, more than a receiver takes


class Things:
    """Descriptors of every kind, opened together, so that the number of open descriptors stays the same."""

    def __init__(self) -> None:
        self._opened: dict[tuple[str, int], int] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        for name in OTHER_THINGS:
            self.descriptor(name)
        for kind in MEMORY_KINDS:
            for nbytes in SEGMENT_BYTES:
                self.descriptors([f"{kind}:{nbytes}"] * (_AT_ONCE if kind in _RENEWED else 1))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self._opened.clear()

    def descriptor(self, name: str, number: int = 0) -> int:
        """Return a descriptor of a kind, which this object keeps open.

        Args:
            name: the kind, with its size if it is memory.
            number: counts the descriptors of the same name in one record.
        """
        key = name, min(number, _AT_ONCE - 1) if name.startswith(_RENEWED) else 0
        if key not in self._opened:
            descriptor = self._opened[key] = self._open(name)
            self._stack.callback(os.close, descriptor)
        elif name.startswith(_RENEWED):
            # Memory can be used once: a receiver frees it when its sender has disconnected.
            with os.fdopen(self._open(name)) as renewed:
                os.dup2(renewed.fileno(), self._opened[key], inheritable=False)
        return self._opened[key]

    def descriptors(self, names: Sequence[str], itself: int = -1) -> list[int]:
        """Return the descriptors of one record, no two of which share memory.

        Args:
            names: their names; "itself" is the socket that the record is written to.
            itself: the descriptor of that socket.
        """
        before: Counter[str] = Counter()
        found = []
        for name in names:
            found.append(itself if name == "itself" else self.descriptor(name, before[name]))
            before[name] += 1
        return found

    def _open(self, name: str) -> int:
        kind, _, size = name.partition(":")
        if size:
            return _memory(kind, int(size))
        match kind:
            case "pipe":
                reader, writer = os.pipe()
                self._stack.callback(os.close, writer)
                return reader
            case "directory":
                return os.open("/", os.O_RDONLY | os.O_DIRECTORY)
            case "file":
                with tempfile.TemporaryFile() as file:
                    file.write(GUARD)
                    return os.dup(file.fileno())
            case "socket":
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._stack.callback(ours.close)
                return theirs.detach()
            case "listener":
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                    sock.bind("")  # the kernel chooses a name outside the file system
                    sock.listen()
                    return sock.detach()
        raise ValueError(f"no thing is called {name!r}")


def _memory(kind: str, nbytes: int) -> int:
    match kind:
        case "huge":
            flags = os.MFD_ALLOW_SEALING | os.MFD_HUGETLB
            descriptor = os.memfd_create(LOOSE_NAME, flags)
            os.ftruncate(descriptor, _HUGE_BYTES)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALED)
            return descriptor
        case "device":
            return os.open("/dev/zero", os.O_RDWR)
    # A read-only descriptor refers to sealed memory, which a subscriber of root can open for writing and map.
    name = LOOSE_NAME if kind in ("unsealed", "write-sealed") else MEMORY_NAME
    descriptor = os.memfd_create(name, os.MFD_ALLOW_SEALING)
    os.write(descriptor, GUARD[:nbytes])
    if kind == "content":
        os.pwrite(descriptor, CONTENT, 0)
    seals = {"unsealed": 0, "growable": _GROWABLE, "write-sealed": _SEALED | fcntl.F_SEAL_WRITE}
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals.get(kind, _SEALED))
    if kind != "read-only":
        return descriptor
    opened = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
    os.close(descriptor)
    return opened
