"""Fixtures of the tests of deployment."""

import pytest

from tests.deployment.containers import problem


@pytest.fixture
def needs_containers() -> None:
    """Skip a test on a machine that cannot run containers."""
    if found := problem():
        pytest.skip(found)
