"""Run the tests of this folder where Ray is installed: `make test-ray`."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

INSTALLED = find_spec("ray") is not None and find_spec("ray.serve") is not None
ROOT = Path(__file__).parents[2]

# Read when Ray is imported, here and in the programs that tests start.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_AUTH_MODE"] = "disabled"  # otherwise, Ray writes a token to the home directory
os.environ["RAY_DEFAULT_OBJECT_STORE_MEMORY_PROPORTION"] = "0.01"

# Warnings that Ray causes; a warning in aiotensor or in a test is still an error.
_NOT_OURS = r"ignore:::(ray)(\.|\Z)"


def pytest_ignore_collect() -> bool | None:
    """Skip the folder if Ray is not installed."""
    return None if INSTALLED else True


def pytest_itemcollected(item: pytest.Item) -> None:
    """Ignore warnings of Ray, and allow for the time of starting its processes."""
    item.add_marker(pytest.mark.filterwarnings(_NOT_OURS))
    item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Start Ray, with this folder importable in its processes."""
    import ray

    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )
    yield
    ray.shutdown()
