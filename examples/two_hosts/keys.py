"""Read the key files of the engine and of the API server, which `aiotensor keys` creates.

Copy `engine.json` to the machine of the engine and `api.json` to that of the API server, over a channel that
you trust, such as SSH. Each file has the secret key of one side and the public key of the other.
"""

from pathlib import Path
from typing import TypeVar

import msgspec

K = TypeVar("K")


class EngineKeys(msgspec.Struct):
    """The keys of the side that listens."""

    secret_key: str
    client_keys: list[str]  # the public keys of all sides that may connect


class ApiKeys(msgspec.Struct):
    """The keys of a side that connects."""

    secret_key: str
    server_key: str  # the public key of the engine


def read(file: str, kind: type[K]) -> K:
    """Return the keys in a file."""
    try:
        return msgspec.json.decode(Path(file).read_bytes(), type=kind)
    except msgspec.DecodeError as error:  # such as the keys of the other side
        hint = "the engine reads engine.json, and the API server api.json"
        raise ValueError(f"{file} is not the key file of this side ({error}): {hint}") from error
