"""The `aiotensor` command. No other package of the library prints."""

from importlib.util import find_spec

__all__ = ["main"]


def main() -> None:
    """Run the command line, and exit with its status."""
    if find_spec("click") is None:
        # Python prints this to stderr and exits with status 1.
        raise SystemExit("`aiotensor` needs click: pip install 'aiotensor[cli]'")
    from aiotensor.cli.command import aiotensor

    aiotensor(prog_name="aiotensor")
