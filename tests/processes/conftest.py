"""Endpoints for tests with several processes."""

from collections.abc import Iterator

import pytest

from verification.places import LINKS


@pytest.fixture
def address() -> Iterator[str]:
    """Name a place for a receiver; afterwards there may be a killed one's socket, and nothing else."""
    with LINKS["unix"].place() as place:
        yield str(place.endpoint)
        assert place.names() in ([], ["s"])
