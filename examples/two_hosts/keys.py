"""Create the key files of the engine and of the API server, in a new folder.

python -m two_hosts.keys two_hosts/keys

Copy `engine.json` to the machine of the engine and `api.json` to that of the API server, over a channel that
you trust, such as SSH. Each file has the secret key of one side and the public key of the other.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

K = TypeVar("K")


class EngineKeys(msgspec.Struct):
    """The keys of the side that listens."""

    secret_key: str
    client_keys: list[str]  # the public keys of all sides that may connect


class ApiKeys(msgspec.Struct):
    """The keys of a side that connects."""

    secret_key: str
    server_key: str  # the public key of the engine


def make(folder: Path) -> None:
    """Make new keys in a new folder."""
    engine_public, engine_secret = (key.decode() for key in zmq.curve_keypair())
    api_public, api_secret = (key.decode() for key in zmq.curve_keypair())
    folder.mkdir(mode=0o700)
    _write(folder / "engine.json", EngineKeys(engine_secret, [api_public]))
    _write(folder / "api.json", ApiKeys(api_secret, engine_public))


def read(file: str, kind: type[K]) -> K:
    """Return the keys in a file."""
    try:
        return msgspec.json.decode(Path(file).read_bytes(), type=kind)
    except msgspec.DecodeError as error:  # such as the keys of the other side
        hint = "the engine reads engine.json, and the API server api.json"
        raise ValueError(f"{file} is not the key file of this side ({error}): {hint}") from error


def _write(path: Path, keys: EngineKeys | ApiKeys) -> None:
    # The file has its mode from the beginning: no other user can open it before the mode is set.
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(msgspec.json.encode(keys))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="two_hosts.keys")
    parser.add_argument("folder", type=Path, help="the folder to create")
    try:
        make(parser.parse_args().folder)
    except FileExistsError as error:
        sys.exit(f"{error.filename} exists; its keys may be in use, so they are not replaced")
    except OSError as error:
        sys.exit(f"{error.filename} cannot be created: {error.strerror}")
