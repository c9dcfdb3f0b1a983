"""The `aiotensor` command and its version; each subcommand lives in a room of its own."""

from importlib.metadata import PackageNotFoundError, version

import click

from aiotensor.cli.demo.command import demo
from aiotensor.cli.doctor.command import doctor
from aiotensor.cli.top.command import top

__all__ = ["aiotensor"]


def _version() -> str:
    try:
        return version("aiotensor")
    except PackageNotFoundError:  # run from a source tree that nobody installed
        return "(not installed)"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(_version(), message="%(prog)s %(version)s")
def aiotensor() -> None:
    """Hand torch tensors from one process to another."""


aiotensor.add_command(demo)
aiotensor.add_command(doctor)
aiotensor.add_command(top)
