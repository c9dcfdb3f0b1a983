"""Write the tables of metrics.md from the declared fields of statistics; run by ``make docs-tables``."""

import re
from pathlib import Path
from typing import get_args

from aiotensor.statistics.fields import families_of
from aiotensor.types import Statistics

__all__ = ["PAGE", "updated"]

PAGE = Path(__file__).with_name("metrics.md")

_KINDS: dict[str, type[Statistics]] = {kind.__name__: kind for kind in get_args(Statistics)}
_TABLE = re.compile(r"(<!-- table of (\w+)[^>]*-->\n).*?(<!-- end of the table -->)", re.DOTALL)


def updated(page: str) -> str:
    """Return a page with tables of the declared metrics between its markers."""
    return _TABLE.sub(lambda found: found[1] + _table(_KINDS[found[2]]) + found[3], page)


def _table(kind: type[Statistics]) -> str:
    rows = ["| name | type | labels | meaning |", "|---|---|---|---|"]
    for family in families_of(kind):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = ", ".join(f"`{label}`" for label in family.labels)
        rows.append(f"| `{name}` | {family.type} | {labels} | {family.text} |")
    return "\n".join([*rows, ""])


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
