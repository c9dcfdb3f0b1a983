"""The `aiotensor` command. No other package of the library prints."""

from aiotensor.cli.extras import missing_extra

__all__ = ["main"]


def main() -> None:
    """Run the command line, and exit with its status."""
    if sentence := missing_extra("aiotensor", ["click"], extra="cli"):
        raise SystemExit(sentence)  # Python prints it to stderr and exits with status 1
    from aiotensor.cli.command import aiotensor
    from aiotensor.cli.output import checked_output

    with checked_output():
        aiotensor(prog_name="aiotensor")
