"""The modes of the event loop in which tests run."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from verification import loops

__all__ = ["in_mode", "leave_out", "leave_out_loops"]


@asynccontextmanager
async def in_mode(name: str) -> AsyncIterator[None]:
    """Set a mode of `loops.MODES`, and fail if the block leaves tasks behind or the loop complains."""
    with loops.complaints() as complaints:
        loops.set_mode(asyncio.get_running_loop(), name)
        before = asyncio.all_tasks() - {asyncio.current_task()}
        yield
        left = asyncio.all_tasks() - {asyncio.current_task()} - before
    assert not left, f"tasks left behind: {left}"
    assert not complaints, "\n".join(complaints)


def leave_out(
    config: pytest.Config,
    items: list[pytest.Item],
    folder: Path,
    is_left_out: Callable[[Path, Mapping[str, object]], bool],
) -> None:
    """Deselect tests of a folder in all modes but the plain one.

    Args:
        config: the configuration of the test run.
        items: the collected tests; deselected ones are removed from this list.
        folder: the folder of the tests.
        is_left_out: returns whether to deselect a test, given its file and its parameters.
    """
    _deselect(
        config,
        items,
        folder,
        lambda path, params: params.get("mode", "plain") != "plain" and is_left_out(path, params),
    )


def leave_out_loops(
    config: pytest.Config,
    items: list[pytest.Item],
    folder: Path,
    is_left_out: Callable[[Path, Mapping[str, object], str], bool],
) -> None:
    """Deselect async tests of a folder on one of the loops.

    Args:
        config: the configuration of the test run.
        items: the collected tests; deselected ones are removed from this list.
        folder: the folder of the tests.
        is_left_out: returns whether to deselect a test, given its file, its parameters and its loop's name.
    """
    names: dict[object, str] = {factory: name for name, factory in loops.FACTORIES.items()}
    _deselect(
        config,
        items,
        folder,
        lambda path, params: (
            (factory := params.get("_asyncio_loop_factory")) is not None  # of pytest-asyncio
            and is_left_out(path, params, names[factory])
        ),
    )


def _deselect(
    config: pytest.Config,
    items: list[pytest.Item],
    folder: Path,
    is_left_out: Callable[[Path, Mapping[str, object]], bool],
) -> None:
    left_out = {
        item
        for item in items
        if isinstance(item, pytest.Function)
        and item.path.parent == folder
        and hasattr(item, "callspec")
        and is_left_out(item.path, item.callspec.params)
    }
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
