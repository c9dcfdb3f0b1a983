"""The `aiotensor` command; each subcommand is defined in a subpackage."""

from importlib.metadata import PackageNotFoundError, version

import click

from aiotensor.cli.doctor.command import doctor
from aiotensor.cli.top.command import top

__all__ = ["aiotensor"]


def _version() -> str:
    try:
        return version("aiotensor")
    except PackageNotFoundError:  # a source tree that is not installed
        return "(not installed)"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(_version(), message="%(prog)s %(version)s")
def aiotensor() -> None:
    """Check this machine, and inspect running receivers and publishers."""


aiotensor.add_command(doctor)
aiotensor.add_command(top)
