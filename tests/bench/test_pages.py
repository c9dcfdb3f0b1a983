"""The results of the benchmark in the documents."""

from pathlib import Path

import msgspec
import pytest

from bench.pages import PAGES, RESULTS, updated
from bench.records import Report
from tests.bench.reports import IN_PLACE, report
from tests.bench.test_tables import rows_of


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_pages_show_the_stored_results(page: Path) -> None:
    """Run `make bench-serving`, or `python -m bench.pages`, to write them."""
    stored = msgspec.json.decode(RESULTS.read_bytes(), type=Report)
    assert stored.failures == []
    assert len({result.contender for result in stored.results}) == 4
    assert updated(page.read_text(), stored) == page.read_text()


def test_tables_and_goals_are_written_between_their_markers() -> None:
    tables = "<!-- tables of bench/results/serving/latest.json -->\n{}<!-- end of the tables -->\n"
    goals = "<!-- goals of bench/results/serving/latest.json -->\n{}<!-- end of the goals -->\n"
    page = "before\n" + tables.format("old\n") + "between\n" + goals.format("") + "after\n"
    written = updated(page, report())
    assert "old" not in written
    assert rows_of(written, f"{IN_PLACE} (uvloop)")[0][1:4] == ["4.5 MiB", "300", "3.00x"]
    assert rows_of(written, "serving, decoding and transfer: CPU time")[0][3:] == ["0.33x", "met"]
    assert "not measured" not in written
    assert "## " not in written
    assert [line for line in ("before", "between", "after") if line in written.splitlines()] == [
        *("before", "between", "after")
    ]
    assert updated(written, report()) == written
