"""Write the results of API servers into README.md and docs/performance.md; run by ``make bench-serving``."""

import re
from collections.abc import Callable
from pathlib import Path

import msgspec

from bench import tables
from bench.records import Report

__all__ = ["PAGES", "RESULTS", "updated"]

_ROOT = Path(__file__).parent.parent
PAGES = (_ROOT / "README.md", _ROOT / "docs" / "performance.md")
RESULTS = _ROOT / "bench" / "results" / "serving" / "latest.json"

_PLACE = re.compile(
    r"(<!-- (tables|goals) of bench/results/serving[^>]*-->\n).*?(<!-- end of the \2 -->)", re.DOTALL
)


def updated(page: str, report: Report) -> str:
    """Return a page with the tables and goals of a report between its markers."""
    return _PLACE.sub(lambda found: found[1] + _PARTS[found[2]](report) + "\n" + found[3], page)


def _tables(report: Report) -> str:
    on_uvloop = [result for result in report.results if result.loop in (None, "uvloop")]
    parts = tables.workloads(msgspec.structs.replace(report, results=on_uvloop))
    titles = ("## ", "| ")
    return "\n\n".join(re.sub("^## (.*)", r"**\1**", part) for part in parts if part.startswith(titles))


def _goals(report: Report) -> str:
    measured = [goal for goal in report.goals if goal.measured is not None]
    return f"{tables.machine(report)}\n\n{tables.goals(msgspec.structs.replace(report, goals=measured))}"


_PARTS: dict[str, Callable[[Report], str]] = {"tables": _tables, "goals": _goals}


if __name__ == "__main__":
    stored = msgspec.json.decode(RESULTS.read_bytes(), type=Report)
    for path in PAGES:
        path.write_text(updated(path.read_text(), stored))
