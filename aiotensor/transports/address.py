"""Addresses that name the file of a socket: ``unix://`` for tensors, ``ipc://`` for messages, or both.

``engine://`` names a folder that contains both files, so that an engine needs only one address.
"""

import os
from urllib.parse import unquote_to_bytes

__all__ = ["MAX_PATH_BYTES", "is_abstract", "is_folder", "label_of", "missing_at", "socket_path"]

MAX_PATH_BYTES = 107  # of a socket's address on Linux

_FILES = {"unix": b"/tensors", "ipc": b"/messages"}  # in the folder of an engine
_LONGEST_FILE = max(_FILES.values(), key=len)


def is_folder(address: str) -> bool:
    """Return whether an address names the folder of an engine."""
    return address.lower().startswith("engine://")


def socket_path(address: str, scheme: str) -> str:
    """Return the path in an address such as ``unix:///run/user/1000/engine.sock``, decoded by `os.fsdecode`.

    ``%`` and two hexadecimal digits stand for a byte, as in other URLs. For ``engine://`` and a folder, it is
    the path of the file in that folder.

    Args:
        address: the address.
        scheme: ``unix`` for tensors, or ``ipc`` for messages.

    Raises:
        ValueError: the address has another scheme, or does not consist of the scheme, ``://`` and an absolute
            path, or the path is too long for a socket.
    """
    found, _, rest = address.partition("://")
    is_valid_scheme = found.lower() == scheme or is_folder(address)
    if not is_valid_scheme or not rest.startswith("/") or "?" in rest or "#" in rest:
        raise ValueError(
            f"the address {address!r} must be {scheme}:// followed by an absolute path, such as "
            f"{scheme}:///run/user/1000/engine.sock, or engine:// followed by the absolute path of a folder, "
            "such as engine:///run/user/1000/engine, or tcp:// with a host and a port; write a question mark "
            "as %3F, and # as %23"
        )
    try:
        path = unquote_to_bytes(os.fsencode(rest))
    except UnicodeEncodeError as error:
        raise ValueError(f"the address {address!r} does not contain a valid path: {error.reason}") from None
    if path.endswith(b"/") or b"\0" in path:
        kind = "folder without a slash at its end" if is_folder(address) else "file"
        raise ValueError(f"the address {address!r} does not name a {kind}")
    # In the folder of an engine, both files need a path that is short enough.
    longest = path + _LONGEST_FILE if is_folder(address) else path
    if len(longest) > MAX_PATH_BYTES:
        raise ValueError(
            f"the path of the address {address!r} is longer than the {MAX_PATH_BYTES} bytes allowed for a "
            "socket: choose a folder with a shorter path"
        )
    if is_folder(address):
        path += _FILES[scheme]
    return os.fsdecode(path)


def label_of(address: str) -> str:
    """Return an address for logs and metrics; bytes that are not UTF-8 are escaped."""
    return address.encode(errors="backslashreplace").decode()


def is_abstract(path: str) -> bool:
    """Return whether the address of a socket is a name without a file, as that of a `TensorQueue`."""
    return path.startswith("\0")


def missing_at(path: str) -> str:
    """Return why no process can be reached at the address of a socket."""
    if is_abstract(path):
        return "no process listens there"
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        return f"the folder {folder} does not exist"
    if not os.path.exists(path):
        return "no process listens there"
    return "the process that listened there has ended, or accepts no connections"
