"""The result of the benchmark in the README."""

import msgspec

from bench.pages import PAGE, RESULTS, updated
from bench.records import Report


def test_the_readme_shows_the_stored_result() -> None:
    """Run `make bench-serving`, or `python -m bench.pages`, to write it."""
    stored = msgspec.json.decode(RESULTS.read_bytes(), type=Report)
    assert stored.failures == []
    assert len({result.contender for result in stored.results}) == 4
    assert updated(PAGE.read_text(), stored) == PAGE.read_text()
