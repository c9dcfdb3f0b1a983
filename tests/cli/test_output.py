"""The command in processes whose standard output cannot be written."""

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import IO

import pytest

from aiotensor.blocking import TensorReceiver
from tests.cli import commands

UNFLUSHED = 120  # the status since Python 3.14, if the interpreter cannot flush standard error at its end
NO_SPACE = "Error: writing to standard output failed: No space left on device\n"

# The real command line with one more subcommand, whose function consists of the given statement.
WITH_SUBCOMMAND = """
import errno, sys
import click
from aiotensor.cli import main
from aiotensor.cli.command import aiotensor

@aiotensor.command()
def extra():
    {statement}

main()
"""

# They all write in one way, which each of the other tests tries with one of them.
each_command = pytest.mark.parametrize("command", ["--help", "doctor", "top ADDRESS"], indirect=True)
one_command = pytest.mark.parametrize("command", ["top ADDRESS"], indirect=True)


@pytest.fixture
def command(request: pytest.FixtureRequest, address: str) -> Iterator[list[str]]:
    """A command line of the real command, for which a receiver listens at the address."""
    with TensorReceiver(address):
        yield commands.aiotensor(*request.param.replace("ADDRESS", address).split())


@pytest.fixture
def full() -> Iterator[IO[bytes]]:
    """A file on a disk without free space."""
    with open("/dev/full", "wb") as file:
        yield file


def run(command_line: list[str], stdout: int | IO[bytes]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command_line, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)


def with_subcommand(statement: str) -> list[str]:
    code = WITH_SUBCOMMAND.format(statement=statement)
    return [sys.executable, "-W", "error", "-c", code, "extra"]


@each_command
def test_a_full_standard_output_is_a_one_line_error(command: list[str], full: IO[bytes]) -> None:
    done = run(command, full)

    assert (done.returncode, done.stderr) == (1, NO_SPACE)


@one_command
def test_a_closed_standard_output_is_a_one_line_error(command: list[str]) -> None:
    closing = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    done = run(closing, subprocess.DEVNULL)

    assert done.returncode == 1
    assert done.stderr == "Error: writing to standard output failed: Bad file descriptor\n"


@one_command
def test_a_broken_pipe_ends_the_command_silently(command: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as pipe:
        done = run(command, pipe)

    assert (done.returncode, done.stderr) == (1, "")


@one_command
def test_the_status_is_not_0_if_standard_error_is_full_too(command: list[str], full: IO[bytes]) -> None:
    done = subprocess.run(command, stdout=full, stderr=full, check=False)

    assert done.returncode in (1, UNFLUSHED)


@pytest.mark.parametrize(
    "statement",
    [
        "print('left in a buffer')",
        "sys.stdout.buffer.write(b'left in a buffer')",
        "click.echo('x' * (1 << 20))",
        "from rich.console import Console; Console().print('a line')",
    ],
)
def test_an_error_of_any_way_to_write_is_reported(statement: str, full: IO[bytes]) -> None:
    done = run(with_subcommand(statement), full)

    assert (done.returncode, done.stderr) == (1, NO_SPACE)


def test_a_write_that_would_block_is_a_one_line_error() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with open(reader, "rb"), open(writer, "wb") as pipe:
        with suppress(BlockingIOError):  # the pipe is full, and is not read
            while True:
                os.write(writer, bytes(4096))
        done = run(with_subcommand("click.echo('a line')"), pipe)

    assert done.returncode == 1
    assert done.stderr == "Error: writing to standard output failed: Resource temporarily unavailable\n"


def test_an_unrelated_error_with_the_same_errno_keeps_its_traceback(full: IO[bytes]) -> None:
    done = run(with_subcommand("raise OSError(errno.ENOSPC, 'of another file')"), full)

    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith("OSError: [Errno 28] of another file\n")
    assert "standard output" not in done.stderr


def test_a_closed_terminal_ends_the_live_view(address: str) -> None:
    leader, follower = pty.openpty()
    with subprocess.Popen(
        commands.aiotensor("top", address, "--interval", "0.05"),
        stdin=subprocess.DEVNULL,
        stdout=follower,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm"},
        text=True,
    ) as process:
        os.close(follower)
        with open(leader, "rb", buffering=0) as screen:
            written = b""
            while b"waiting for the next one" not in written:
                written += screen.read(1 << 16)
        try:
            _, errors = process.communicate(timeout=30)
        finally:
            process.kill()

    assert process.returncode == 1
    assert errors == "Error: writing to standard output failed: Input/output error\n"


def test_a_closed_terminal_is_a_one_line_error() -> None:
    leader, follower = pty.openpty()
    # By the time the doctor imports rich, it has found a terminal, and has written nothing.
    code = (
        "import os, sys; from aiotensor.cli import main\n"
        "def close(event, arguments):\n"
        f"    if event == 'import' and arguments[0] == 'rich.console': os.close({leader})\n"
        "sys.addaudithook(close); main()"
    )
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code, "doctor"],
        stdout=follower,
        stderr=subprocess.PIPE,
        pass_fds=[leader],
        text=True,
    ) as process:
        os.close(leader)
        os.close(follower)
        _, errors = process.communicate()

    assert process.returncode == 1
    assert errors == "Error: writing to standard output failed: Input/output error\n"
