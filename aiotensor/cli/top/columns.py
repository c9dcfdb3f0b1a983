"""A table that fits its terminal. Needs rich."""

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

__all__ = ["FittingTable"]

_GAP = 2  # between columns


class FittingTable:
    """Draw a table, without its least important columns if the terminal is too narrow for all.

    Args:
        names: the names of the columns. The numbers in them are right-justified.
        texts: the names of the columns that contain text, which is left-justified.
        dispensable: the names of the columns that may be omitted, in the order in which they are.
    """

    def __init__(self, names: Sequence[str], *, texts: Sequence[str], dispensable: Sequence[str]) -> None:
        self._names = names
        self._texts = texts
        self._dispensable = dispensable
        self._rows: list[dict[str, Text]] = []

    def add_row(self, *cells: Text | str) -> None:
        """Add a row, with one cell for each column."""
        row = [cell if isinstance(cell, Text) else Text(cell) for cell in cells]
        self._rows.append(dict(zip(self._names, row, strict=True)))

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        shown = list(self._names)
        dispensable = iter(self._dispensable)
        while self._width(shown) > options.max_width and (omitted := next(dispensable, None)):
            shown.remove(omitted)
        table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
        for name in shown:
            table.add_column(name, justify="left" if name in self._texts else "right", no_wrap=True)
        for row in self._rows:
            table.add_row(*(row[name] for name in shown))
        yield table

    def _width(self, names: Sequence[str]) -> int:
        widths = (max([len(name), *(row[name].cell_len for row in self._rows)]) for name in names)
        return sum(widths) + _GAP * (len(names) - 1)
