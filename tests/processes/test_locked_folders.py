"""Opening where another process holds the lock of the socket's folder."""

# ruff: noqa: ASYNC221 - the processes and paths of tests are quick
import asyncio
import fcntl
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aiotensor import TensorReceiver
from aiotensor.transports import unix
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

_ROOT = Path(__file__).parents[2]
_LIMIT_S = 60.0  # an interpreter that exits at all needs much less
_HOLD = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], 0), 2); print('held', flush=True); input()"
# A program that opens a receiver, with a time limit.
_OPEN = """
import asyncio, sys
from aiotensor import TensorReceiver

async def main():
    try:
        async with asyncio.timeout(0.1):
            await TensorReceiver(sys.argv[1]).__aenter__()
    except TimeoutError:
        print("timed out")

asyncio.run(main())
"""


def folder_of(address: str) -> str:
    return os.path.dirname(address.removeprefix("unix://"))


@contextmanager
def another_process_locks(folder: str) -> Iterator["subprocess.Popen[str]"]:
    """Hold the lock of a folder in another process, until that ends."""
    command = [sys.executable, "-c", _HOLD, folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        try:
            yield holder
        finally:
            holder.kill()


@pytest.mark.promise(4)
async def test_a_process_whose_opening_timed_out_at_a_locked_folder_exits(address: str) -> None:
    with another_process_locks(folder_of(address)):
        command = [sys.executable, "-c", _OPEN, address]
        ended = subprocess.run(
            command, cwd=_ROOT, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "timed out\n", "")
    assert not os.listdir(folder_of(address))


@pytest.mark.promise(2)
async def test_opening_continues_when_the_process_that_holds_the_lock_is_killed(address: str) -> None:
    listener = TensorReceiver(address)
    with another_process_locks(folder_of(address)) as holder:
        opening = asyncio.create_task(listener.__aenter__())
        await asyncio.sleep(0)
        assert not opening.done()
        holder.kill()
        await opening
    await listener.aclose()


async def test_a_long_wait_for_a_locked_folder_is_logged_once(
    address: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[int] = []
    flock = fcntl.flock

    def count(descriptor: int, operation: int) -> None:
        if operation & fcntl.LOCK_NB:
            attempts.append(descriptor)
        flock(descriptor, operation)

    monkeypatch.setattr(unix, "_LONG_WAIT_S", 0.01)
    monkeypatch.setattr(fcntl, "flock", count)
    folder = os.open(folder_of(address), os.O_RDONLY)
    try:
        flock(folder, fcntl.LOCK_EX)
        receiver = TensorReceiver(address)
        opening = asyncio.create_task(receiver.__aenter__())
        await until(lambda: bool(caplog.records))
        tried = len(attempts)
        await until(lambda: len(attempts) > tried + 3)  # and nothing is logged again
        assert not opening.done()
    finally:
        os.close(folder)
    await opening
    await receiver.aclose()
    [record] = caplog.records
    assert (record.levelno, record.name) == (logging.WARNING, "aiotensor.transports")
    assert vars(record)["event"] == "folder_locked"
    assert vars(record)["folder"] == folder_of(address)
    assert vars(record)["address"] == address.removeprefix("unix://")
    assert vars(record)["waited_s"] >= 0.01
