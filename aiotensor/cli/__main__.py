"""Let `python -m aiotensor.cli` do what the `aiotensor` command does."""

from aiotensor.cli import main

if __name__ == "__main__":
    main()
