"""The addresses that subcommands accept, and the CURVE keys for them.

A secret key is never an argument: other users could read it with `ps`.
"""

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import click

from aiotensor.transports.address import socket_path
from aiotensor.transports.zeromq.addresses import parse

__all__ = [
    "FORMS",
    "HOW_TO_GIVE",
    "Keys",
    "is_port",
    "key_options",
    "keys_for",
    "needs_keys",
    "valid_address",
]

FORMS = "unix:///PATH|engine:///PATH|tcp://HOST:PORT"

_KEY_VARIABLE = "AIOTENSOR_SECRET_KEY"
_KEY_BYTES = 32
_LONGEST_FILE = 4096
_NO_KEY = "expected a key of 40 characters, as returned by zmq.curve_keypair()"
_FILE_OR_VARIABLE = f"with --secret-key-file or in the environment variable {_KEY_VARIABLE}"
HOW_TO_GIVE = (
    f"Pass --server-key, and the secret key of this side {_FILE_OR_VARIABLE}; zmq.curve_keypair() creates a "
    "pair of keys"
)

Command = TypeVar("Command", bound=Callable[..., object])


class Keys(NamedTuple):
    """The keys for one address; both are None if there are none.

    Attributes:
        secret_key: the secret key of this side.
        server_key: the public key of the receiver or publisher.
    """

    secret_key: str | None = None
    server_key: str | None = None


def valid_address(_: click.Context, option: click.Parameter, address: str | None) -> str | None:
    """Return the address of a receiver or publisher; the callback of parameters for it."""
    if address is None:
        return None
    if address.lower().startswith("ipc:"):
        raise click.BadParameter(
            f"{address} is the address of a MessageServer, which cannot be inspected. Pass the address of a "
            "TensorReceiver or a Publisher; the Prometheus metrics of a process include its MessageServers.",
            param=option,
        )
    try:
        if is_port(address):
            parse(address, has_keys=True, is_client=True)
        else:
            socket_path(address, "unix")
    except ValueError as error:
        raise click.BadParameter(str(error), param=option) from error
    return address


def is_port(address: str) -> bool:
    """Return whether an address has the scheme ``tcp``."""
    return address.lower().startswith("tcp:")


def needs_keys(address: str) -> bool:
    """Return whether a valid address is a ``tcp://`` address that other machines can reach."""
    return is_port(address) and not parse(address, has_keys=True, is_client=True).is_local


def key_options(command: Command) -> Command:
    """Add the options for keys to a command, which receives the arguments `secret_key` and `server_key`."""
    for option in (
        click.option(
            "--server-key",
            callback=_server_key,
            metavar="KEY|PATH",
            help="Public key of the receiver or publisher at a tcp:// address, or a file that contains it.",
        ),
        click.option(
            "--secret-key-file",
            "secret_key",
            callback=_secret_key,
            metavar="PATH",
            help="File with the secret key of this side, for --server-key. "
            f"[default: the key in the environment variable {_KEY_VARIABLE}]",
        ),
    ):
        command = option(command)
    return command


def keys_for(address: str | None, secret_key: str | None, server_key: str | None) -> Keys:
    """Return the keys to use at an address.

    The environment variable is read only if there is a server key, so it may be set in a shell that is also
    used for addresses without keys.

    Args:
        address: the address; None if the user gave none.
        secret_key: the key in the file that the user gave; None if the user gave none.
        server_key: the key of the receiver or publisher; None if the user gave none.

    Raises:
        click.UsageError: one of the two keys is missing or invalid, or the address does not use keys.
    """
    if secret_key is None and server_key is None:
        return Keys()
    if address is None or not is_port(address):
        raise click.UsageError("--server-key and --secret-key-file can only be used with tcp:// addresses")
    if server_key is None:
        raise click.UsageError("--secret-key-file requires --server-key, the public key of the other side")
    if secret_key is None:
        secret_key = os.environ.get(_KEY_VARIABLE)
        if not secret_key:
            raise click.UsageError(f"--server-key requires the secret key of this side, {_FILE_OR_VARIABLE}")
        secret_key = secret_key.strip()
        if not _is_key(secret_key):
            raise click.UsageError(f"{_KEY_VARIABLE}: {_NO_KEY}")
    return Keys(secret_key, server_key)


def _secret_key(_: click.Context, option: click.Parameter, path: str | None) -> str | None:
    return None if path is None else _valid_key(_content(path, option), option)


def _server_key(_: click.Context, option: click.Parameter, value: str | None) -> str | None:
    if value is None:
        return None
    # A path may look like a key, so files are tried first; no file has the name of a key by chance.
    return _valid_key(_content(value, option) if os.path.lexists(value) else value, option)


def _content(path: str, option: click.Parameter) -> str:
    try:
        with Path(path).open("rb") as file:
            return file.read(_LONGEST_FILE).decode(errors="replace").strip()
    except OSError as error:
        raise click.BadParameter(f"{path!r} cannot be read: {error.strerror}", param=option) from error


def _valid_key(key: str, option: click.Parameter) -> str:
    if not _is_key(key):  # the error does not contain it: it may be a secret with a typo
        raise click.BadParameter(_NO_KEY, param=option)
    return key


def _is_key(text: str) -> bool:
    from zmq.utils import z85  # imported only here: most uses of the commands do not need ZeroMQ

    try:
        return len(z85.decode(text.encode())) == _KEY_BYTES
    except (KeyError, ValueError, struct.error):
        return False
