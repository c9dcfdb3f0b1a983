"""The addresses that subcommands accept, and the key files that `aiotensor keys` writes and others read.

Each key file is a JSON object with the keyword arguments of one side. A secret key is never an argument of a
command: other users could read it with `ps`.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import click
import msgspec

from aiotensor.transports.address import TcpArguments, socket_path, tcp_address

FORMS = "unix:///PATH|tcp://HOST:PORT"

HOW_TO_GIVE = (
    "Pass --keys with the file of a side that connects, such as api.json, which `aiotensor keys` writes"
)

_ENGINE = "engine"
_LARGEST_FILE = 65536

Command = TypeVar("Command", bound=Callable[..., object])


# Addresses


def valid_address(_: click.Context, option: click.Parameter, address: str | None) -> str | None:
    """Return an address to connect to; the callback of parameters for it."""
    try:
        if address is not None and is_port(address):
            tcp_address(address, has_keys=True, connects=True)
        elif address is not None:
            socket_path(address)
    except ValueError as error:
        raise click.BadParameter(str(error), param=option) from error
    return address


def is_port(address: str) -> bool:
    """Return whether an address has the scheme ``tcp``."""
    return address.lower().startswith("tcp:")


def needs_keys(address: str) -> bool:
    """Return whether a valid address is a ``tcp://`` address that other machines can reach."""
    return is_port(address) and not tcp_address(address, has_keys=True, connects=True).is_local


# Keys


class Keys(NamedTuple):
    """The keys for one address; both are None if there are none.

    Attributes:
        secret_key: the secret key of this side.
        server_key: the public key of the side that listens.
    """

    secret_key: str | None = None
    server_key: str | None = None


class _Listening(msgspec.Struct):
    secret_key: str
    client_keys: list[str]


class _Connecting(msgspec.Struct):
    secret_key: str
    server_key: str


def write_keys(folder: Path, names: Sequence[str]) -> None:
    """Write the key files of an engine and of the sides that connect to it, in a new folder.

    Args:
        folder: the folder to create.
        names: the names of the files of the sides that connect, without ``.json``.

    Raises:
        ValueError: a name cannot be that of a file, or occurs twice.
        OSError: the folder exists or cannot be created.
    """
    import zmq  # imported only here: most uses of the commands do not need ZeroMQ

    for name in names:
        if name in ("", "..") or name != Path(name).name or [_ENGINE, *names].count(name) > 1:
            raise ValueError(f"{name!r} cannot be the name of a side: pass different names, such as api-1")
    public, secret = zmq.curve_keypair()
    pairs = {name: zmq.curve_keypair() for name in names}
    folder.mkdir(mode=0o700)
    clients = [key.decode() for key, _ in pairs.values()]
    _write(folder / f"{_ENGINE}.json", _Listening(secret.decode(), clients))
    for name, (_, own) in pairs.items():
        _write(folder / f"{name}.json", _Connecting(own.decode(), public.decode()))


def _write(path: Path, keys: _Listening | _Connecting) -> None:
    # The file has its mode from the beginning: no other user can open it before the mode is set.
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(keys)) + b"\n")


def keys_option(command: Command) -> Command:
    """Add the option for keys to a command, which receives the argument `keys`."""
    option = click.option(
        "--keys",
        callback=_keys,
        metavar="FILE",
        help="For a tcp:// address: the key file of a side that connects, such as api.json, which "
        "`aiotensor keys` writes.",
    )
    return option(command)


def check_keys(address: str | None, keys: Keys) -> None:
    """Raise `click.UsageError` if there are keys, but the address does not use them."""
    if keys.secret_key is not None and (address is None or not is_port(address)):
        raise click.UsageError("--keys can only be used with tcp:// addresses")


def _keys(_: click.Context, option: click.Parameter, path: str | None) -> Keys:
    if path is None:
        return Keys()
    try:
        with Path(path).open("rb") as file:
            content = file.read(_LARGEST_FILE)
    except OSError as error:
        raise click.BadParameter(f"{path!r} cannot be read: {error.strerror}", param=option) from error
    from aiotensor.transports.tcp.sockets import curve_options

    try:
        found = msgspec.json.decode(content, type=_Connecting)
        curve_options(TcpArguments(True, found.secret_key, found.server_key))
    except ValueError as error:  # its text contains no key: it may be a secret with a typo
        expected = "is not the key file of a side that connects, such as api.json"
        raise click.BadParameter(f"{path!r} {expected}: {error}", param=option) from error
    return Keys(found.secret_key, found.server_key)
