"""The spans of a test."""

from collections.abc import Iterator

import pytest
from opentelemetry import trace

from tests.integrations.opentelemetry.spans import Recorder, recording


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """The spans of this process; fails a test that does not end them all, or leaves one current."""
    with recording() as recorder:
        yield recorder
        assert trace.get_current_span() is trace.INVALID_SPAN
