"""Run the `aiotensor` command as `python -m aiotensor`."""

from aiotensor.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
