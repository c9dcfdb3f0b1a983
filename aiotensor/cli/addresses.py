"""The addresses that subcommands accept."""

import click

from aiotensor.transports.address import socket_path, tcp_address

__all__ = ["FORMS", "is_port", "needs_keys", "valid_address"]

FORMS = "unix:///PATH|tcp://HOST:PORT"


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
