"""The addresses that subcommands accept."""

import click

from aiotensor.transports.address import socket_path
from aiotensor.transports.zeromq.addresses import parse

__all__ = ["FORMS", "is_port", "needs_keys", "valid_address"]

FORMS = "unix:///PATH|engine:///PATH|tcp://HOST:PORT"


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
