"""The tests of cancellation, with tracing: no span stays open or current, wherever a call is cancelled."""

from collections.abc import Iterator

import pytest
from opentelemetry import trace

from tests.cancellation.test_broadcast import *  # noqa: F403
from tests.cancellation.test_receive import *  # noqa: F403
from tests.cancellation.test_send import *  # noqa: F403
from tests.integrations.opentelemetry.spans import recording
from tests.pairs import Links

pytestmark = [pytest.mark.extended, pytest.mark.usefixtures("link", "nothing_left_behind")]  # type: ignore[assignment]


@pytest.fixture(params=["unix"])
def link(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the tests over one link."""
    before, Links.current = Links.current, request.param
    yield request.param
    Links.current = before


@pytest.fixture(autouse=True)
def traced() -> Iterator[None]:
    """Fail a test that leaves a span open or current."""
    with recording():
        yield
        assert trace.get_current_span() is trace.INVALID_SPAN
