"""The links and loops over which the tests of cancellation run."""

from pathlib import Path

import pytest

from verification.loops import FACTORIES

# The links that resemble each other most, over the sockets of this machine, are on different loops.
_LOOPS = {"queue": "asyncio", "stock": "uvloop", "tcp": "asyncio", "unix": "uvloop"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run each test over every link, but over each link on one loop only.

    Every operation is so cancelled on both loops. That each link works on each loop is shown by the tests of
    conformance.
    """
    left_out = {item for item in items if item.path.parent == Path(__file__).parent and _is_left_out(item)}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _is_left_out(item: pytest.Item) -> bool:
    if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return False
    params = item.callspec.params
    loop = _LOOPS.get(str(params.get("link")))
    others = [factory for name, factory in FACTORIES.items() if loop is not None and name != loop]
    return any(value is factory for value in params.values() for factory in others)
