"""The descriptors that a rogue sends: valid memory, invalid memory, and other files."""

import contextlib
import fcntl
import os
import socket
import struct
from collections import Counter
from collections.abc import Sequence

import numpy as np
from msgspec.msgpack import Ext, encode

from aiotensor.codec.placeholders import TENSOR

# As the kernel lists memory, behind "memfd:"; memory named "loose" must never be mapped.
MEMORY_NAME, LOOSE_NAME = "fuzz", "loose"

# The bytes of a rogue's memory, by offset: no two windows of a few bytes are equal.
_OFFSETS = np.arange(1 << 16, dtype=np.uint32)
GUARD = ((_OFFSETS * 2654435761) >> 13).astype(np.uint8).tobytes()

SEGMENT_BYTES = (4096, 8192, 65536)

WHERE = struct.Struct("<QQ")  # a position: the number of a segment, and the offset in it

# The first bytes of the memory called "content": the content of a publication, with a tensor in segment 0.
_BODY = encode({"number": 1, "tensors": [Ext(TENSOR, encode(["at", 0, 0]))]})
CONTENT = encode([_BODY, [["uint8", [64], "arena", WHERE.pack(0, 1024), 99]]])
IMAGE = CONTENT + GUARD[len(CONTENT) :]  # the bytes of that memory

# Segments must be sealed; memory that others may write to, or that may only grow, is accepted too.
MEMORY_KINDS = ("sealed", "unsealed", "read-only", "write-sealed", "growable", "content", "huge", "device")
OTHER_THINGS = ("pipe", "directory", "file", "socket", "listener")

_GROWABLE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_SEALED = _GROWABLE | fcntl.F_SEAL_GROW
_SEALS = {"unsealed": 0, "growable": _GROWABLE, "write-sealed": _SEALED | fcntl.F_SEAL_WRITE}
_HUGE_BYTES = 2 << 20


class Things(contextlib.ExitStack):
    """Descriptors of every kind; the latest ones of each name stay open until the end of the block."""

    def __init__(self) -> None:
        super().__init__()
        self._opened: dict[tuple[str, int], int] = {}

    def descriptors(self, names: Sequence[str], itself: int = -1) -> list[int]:
        """Return the descriptors of one record, no two of which share memory.

        Args:
            names: their names, which contain the size of memory; "itself" is the socket of the record.
            itself: the descriptor of that socket.
        """
        before: Counter[str] = Counter()
        found = []
        for name in names:
            found.append(itself if name == "itself" else self._renewed(name, before[name]))
            before[name] += 1
        return found

    def _renewed(self, name: str, number: int) -> int:
        """Open a thing, in place of an earlier one: a receiver frees memory when its sender has gone."""
        key = name, number if ":" in name else 0
        new = _opened(name)
        if key in self._opened:
            os.dup2(new, self._opened[key], inheritable=False)
            os.close(new)
        else:
            self._opened[key] = new
            self.callback(os.close, new)
        return self._opened[key]


def _opened(name: str) -> int:
    """Open a thing."""
    kind, _, size = name.partition(":")
    match kind:
        case "pipe":
            reader, writer = os.pipe()
            os.close(writer)
            return reader
        case "directory" | "file" | "device":
            return os.open({"directory": "/", "file": __file__, "device": "/dev/zero"}[kind], os.O_RDONLY)
        case "socket" | "listener":
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                if kind == "listener":
                    sock.bind("")  # the kernel chooses a name outside the file system
                    sock.listen()
                return sock.detach()
    # A read-only descriptor refers to sealed memory, which a subscriber of root can open for writing and map.
    is_loose = kind in ("unsealed", "write-sealed", "huge")
    flags = os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB if kind == "huge" else 0)
    descriptor = os.memfd_create(LOOSE_NAME if is_loose else MEMORY_NAME, flags)
    if kind == "huge":
        os.ftruncate(descriptor, _HUGE_BYTES)
    else:
        os.write(descriptor, (IMAGE if kind == "content" else GUARD)[: int(size)])
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS.get(kind, _SEALED))
    if kind == "read-only":
        opened = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
        os.close(descriptor)
        return opened
    return descriptor
