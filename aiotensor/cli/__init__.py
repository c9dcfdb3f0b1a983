"""The `aiotensor` command. These are the only rooms that print."""

from aiotensor.cli.extras import missing_extra

__all__ = ["main"]


def main() -> None:
    """Run the command line, and exit with its status."""
    if sentence := missing_extra("aiotensor", ["click"], extra="cli"):
        raise SystemExit(sentence)  # Python prints it to stderr and exits with status 1
    from aiotensor.cli.command import aiotensor

    aiotensor(prog_name="aiotensor")
