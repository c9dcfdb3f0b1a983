"""The tests that a run includes: those of `make test`, or all of them.

`make test-all` sets ``AIOTENSOR_TESTS=all``. In `make test`, a test that takes a link runs over Unix sockets
on asyncio, and over TCP on uvloop; other asynchronous tests run on uvloop. Tests marked with `both_loops` run
on both. `make test-all` runs them over every link, on both loops (over links that resemble Unix sockets on
one), and, where a test has a mode, in every mode of the loop over Unix sockets. A test marked with `extended`
runs in `make test-all` only.
"""

import asyncio
import os
from collections.abc import Callable, Mapping

import pytest

from aiotensor.memory import tensors
from verification import loops, places

COMPLETE = os.environ.get("AIOTENSOR_TESTS") == "all"

LINKS = list(places.LINKS) if COMPLETE else ["unix", "tcp"]
LOCAL_LINKS = [link for link in LINKS if places.LINKS[link].is_local]
MODES = loops.MODES if COMPLETE else ["plain"]

# One dtype of each kind and size, for tests that read bytes; tests/test_values.py sends every dtype.
_FEW = ["bool", "uint8", "bfloat16", "float32", "float8_e4m3fn", "complex128"]
DTYPES = {name: dtype for name, dtype in tensors.DTYPES.items() if COMPLETE or name in _FEW}

# The loop for each link. Unix sockets and TCP differ most, so each has one of the loops.
_LOOPS = {"queue": "asyncio", "encrypted": "asyncio"} if COMPLETE else {"unix": "asyncio", "tcp": "uvloop"}

# The parameters that choose a link.
_LINK_NAMES = ("link", "endpoint", "pairs", "place", "route")

_NAMES: dict[object, str] = {factory: name for name, factory in loops.FACTORIES.items()}


def loop_factories(item: pytest.Function) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Return the loops of an asynchronous test; `select` chooses one of them for each link."""
    if COMPLETE or item.get_closest_marker("both_loops") or not {*_LINK_NAMES}.isdisjoint(item.fixturenames):
        return loops.FACTORIES
    return {"uvloop": loops.FACTORIES["uvloop"]}


def only_asyncio() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Return the loop of the tests of a folder in which the loop makes no difference."""
    return {"asyncio": loops.FACTORIES["asyncio"]}


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remove the tests from a list that this run does not include."""
    removed = {item for item in items if not _is_included(item)}
    config.hook.pytest_deselected(items=list(removed))
    items[:] = [item for item in items if item not in removed]


def _is_included(item: pytest.Item) -> bool:
    if not COMPLETE and item.get_closest_marker("extended"):
        return False
    params: Mapping[str, object] = (
        item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    )
    link = next((params[name] for name in _LINK_NAMES if isinstance(params.get(name), str)), None)
    if params.get("mode", "plain") != "plain" and link not in (None, "unix"):
        return False
    if link is None or item.get_closest_marker("both_loops"):
        return True
    loop = _NAMES.get(params.get("_asyncio_loop_factory"))  # a parameter of pytest-asyncio
    return loop is None or loop == _LOOPS.get(str(link), loop)
