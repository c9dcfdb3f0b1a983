"""The `aiotensor` command; each subcommand is defined in a subpackage."""

import click

from aiotensor import __version__
from aiotensor.cli.doctor.command import doctor
from aiotensor.cli.top.command import top

__all__ = ["aiotensor"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(prog)s %(version)s")
def aiotensor() -> None:
    """Check this machine, and inspect running receivers and publishers."""


aiotensor.add_command(doctor)
aiotensor.add_command(top)
