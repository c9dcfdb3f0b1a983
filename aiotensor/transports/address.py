"""Addresses that name the file of a socket: ``unix://`` for tensors, ``ipc://`` for messages."""

import os
from urllib.parse import unquote_to_bytes

__all__ = ["MAX_PATH_BYTES", "label_of", "socket_path"]

MAX_PATH_BYTES = 107  # of a socket's address on Linux


def socket_path(address: str, scheme: str) -> str:
    """Return the path in an address such as ``unix:///run/user/1000/engine.sock``, decoded by `os.fsdecode`.

    ``%`` and two hexadecimal digits stand for a byte, as in other URLs.

    Raises:
        ValueError: the address has another scheme, or does not consist of the scheme, ``://`` and an absolute
            path, or the path is too long for a socket.
    """
    found, _, rest = address.partition("://")
    if found.lower() != scheme or not rest.startswith("/") or "?" in rest or "#" in rest:
        raise ValueError(
            f"the address {address!r} must be {scheme}:// followed by an absolute path, such as "
            f"{scheme}:///run/user/1000/engine.sock; write a question mark as %3F, and # as %23"
        )
    try:
        path = unquote_to_bytes(os.fsencode(rest))
    except UnicodeEncodeError as error:
        raise ValueError(f"the address {address!r} does not contain a valid path: {error.reason}") from None
    if path.endswith(b"/") or b"\0" in path:
        raise ValueError(f"the address {address!r} does not name a file")
    if len(path) > MAX_PATH_BYTES:
        raise ValueError(
            f"the path of the address {address!r} is longer than the {MAX_PATH_BYTES} bytes allowed for a "
            "socket: choose a folder with a shorter path"
        )
    return os.fsdecode(path)


def label_of(address: str) -> str:
    """Return an address for logs and metrics; bytes that are not UTF-8 are escaped."""
    return address.encode(errors="backslashreplace").decode()
