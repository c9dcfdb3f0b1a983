"""Paths where nothing can listen, each of which is an error that names the folder, and forked children."""

# ruff: noqa: ASYNC240 - the paths of tests are quick
import asyncio
import contextlib
import errno
import fcntl
import os
from pathlib import Path

import pytest

from aiotensor import TensorReceiver, UsageError
from tests.runtime.test_affinity import forks, in_a_fork
from tests.transports.unix_ends import NOBODY, in_child, leave_stale, needs_root
from verification.places import free_port
from verification.waiting import until


def listen(path: Path) -> TensorReceiver:
    return TensorReceiver(f"unix://{path}")


async def test_the_error_about_an_unusable_folder_names_it(path: Path) -> None:
    missing = path.parent / "missing"
    with pytest.raises(FileNotFoundError, match="No such file or directory") as caught:
        await listen(missing / "s").__aenter__()
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, str(missing))
    assert str(missing / "s") in str(caught.value)
    path.write_text("precious")
    with pytest.raises(NotADirectoryError, match="Not a directory") as no_folder:
        await listen(path / "s").__aenter__()
    assert (no_folder.value.errno, no_folder.value.filename) == (errno.ENOTDIR, str(path))


def _refusal_as_nobody(path: Path) -> tuple[str, int, str]:
    os.setuid(NOBODY)

    async def refusal() -> OSError:
        try:
            await listen(path).__aenter__()
        except OSError as error:
            return error
        raise AssertionError("it was opened")

    error = asyncio.run(refusal())
    return type(error).__name__, error.errno or 0, str(error.filename)


@needs_root
@pytest.mark.parametrize("mode", [0o700, 0o755], ids=oct)
async def test_a_folder_that_this_user_may_not_use_is_a_permission_error(mode: int, path: Path) -> None:
    path.parent.chmod(mode)
    refusal = await in_child(_refusal_as_nobody, path)
    assert refusal == ("PermissionError", errno.EACCES, str(path.parent))


@needs_root
async def test_the_stale_socket_of_another_user_is_not_removed(path: Path) -> None:
    leave_stale(path)
    path.chmod(0o600)
    path.parent.chmod(0o777)
    assert await in_child(_usage_error_as_nobody, path)
    assert path.exists()


def _usage_error_as_nobody(path: Path) -> bool:
    os.setuid(NOBODY)

    async def is_refused() -> bool:
        with pytest.raises(UsageError, match="not a socket of this user"):
            await listen(path).__aenter__()
        return True

    return asyncio.run(is_refused())


def _open_descriptors() -> dict[int, str]:
    descriptors = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing
            descriptors[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return descriptors


def _left_in_a_fork(ours: dict[int, str]) -> str:
    """Say which of these descriptors a child has that is forked now."""

    def tell() -> None:
        raise RuntimeError(sorted(target for one, target in _open_descriptors().items() if one in ours))

    return in_a_fork(tell)


@forks
async def test_a_child_forked_while_the_folder_is_locked_has_neither_the_socket_nor_the_folder(
    path: Path,
) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    before = _open_descriptors()

    def opened() -> dict[int, str]:
        return {one: target for one, target in _open_descriptors().items() if one not in before}

    listener = listen(path)
    opening = asyncio.create_task(listener.__aenter__())
    try:
        await until(lambda: str(path.parent) in opened().values())
        assert any(target.startswith("socket:") for target in opened().values())
        assert _left_in_a_fork(opened()) == "RuntimeError: []"
    finally:
        os.close(folder)
        await opening
        await listener.aclose()


@forks
@pytest.mark.parametrize("scheme", ["unix", "tcp"])
async def test_a_child_forked_by_a_listening_process_does_not_listen(scheme: str, path: Path) -> None:
    before = _open_descriptors()
    async with TensorReceiver(f"unix://{path}" if scheme == "unix" else f"tcp://127.0.0.1:{free_port()}"):
        sockets = {
            one: target
            for one, target in _open_descriptors().items()
            if one not in before and target.startswith("socket:")
        }
        assert sockets
        assert _left_in_a_fork(sockets) == "RuntimeError: []"
