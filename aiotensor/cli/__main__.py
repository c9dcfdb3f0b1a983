"""Run the `aiotensor` command as `python -m aiotensor.cli`."""

from aiotensor.cli import main

if __name__ == "__main__":
    main()
