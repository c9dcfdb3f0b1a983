"""The calls of Python functions that a small tensor and a request may take."""

import pytest

from bench.calls import KINDS, Kind, count


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_step_takes_no_more_calls_than_its_goal_allows(kind: Kind) -> None:
    assert 10 < count(kind) <= kind.most
