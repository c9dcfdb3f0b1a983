"""Inspect receivers and publishers at tcp:// addresses with the command."""

import asyncio
import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from aiotensor import TensorReceiver, TensorSender
from aiotensor.broadcast import Publisher
from aiotensor.cli.command import aiotensor as command
from tests.cli.commands import Pair
from verification.patterns import BIG, pattern
from verification.places import free_port
from verification.waiting import until


async def top(*arguments: str, **environment: str) -> Result:
    """Run the command in another thread, which does not block the loop."""
    return await asyncio.to_thread(CliRunner().invoke, command, ["top", *arguments], env=environment)


@pytest.fixture
def address() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
def ours() -> Pair:
    return Pair.new()


@pytest.fixture
def theirs() -> Pair:
    return Pair.new()


async def test_a_receiver_at_a_port_is_shown_with_its_senders(address: str) -> None:
    async with TensorReceiver(address) as receiver, TensorSender(address, 2, 4 << 20) as sender:
        await sender.send(pattern(0, BIG))
        await until(lambda: receiver.statistics().unclaimed_tensors == 1)
        lines = await top(address, "--patience", "10")
        structured = await top(address, "--json", "--patience", "10", "--interval", "0.1")

    assert lines.stderr == structured.stderr == ""
    first, second, _ = lines.stdout.splitlines()
    assert first.startswith(f"receiver pid {os.getpid()} at {address}: 1 of 64 senders")
    assert second.startswith(f"sender pid {os.getpid()} ({sender.id[:6]}): 1 of 2 permits")
    found = json.loads(structured.stdout)
    assert (found["address"], found["receiver"]) == (address, receiver.id)
    assert [one["sender"] for one in found["senders"]] == [sender.id]


async def test_keys_come_from_files_or_the_environment(
    address: str, ours: Pair, theirs: Pair, tmp_path: Path
) -> None:
    secret = ours.secret_file(tmp_path)
    public = tmp_path / "public"
    public.write_text(f"{theirs.public}\n")
    # The same port, by an address that needs keys.
    reached = address.replace("127.0.0.1", "0.0.0.0")  # noqa: S104 - nothing listens at it
    async with Publisher(address, secret_key=theirs.secret, client_keys=[ours.public]):
        shown = [
            await top(
                reached, "--patience", "10", "--server-key", theirs.public, "--secret-key-file", secret
            ),
            await top(
                *(reached, "--patience", "10", "--server-key", str(public)), AIOTENSOR_SECRET_KEY=ours.secret
            ),
        ]

    for done in shown:
        assert done.stderr == ""
        assert done.exit_code == 0
        assert done.stdout.startswith(f"publisher pid {os.getpid()} at {reached}: ")


async def test_a_file_takes_precedence_over_the_environment(
    address: str, ours: Pair, theirs: Pair, tmp_path: Path
) -> None:
    keys = ("--server-key", theirs.public, "--secret-key-file", ours.secret_file(tmp_path))
    async with TensorReceiver(address, secret_key=theirs.secret, client_keys=[ours.public]):
        done = await top(address, "--patience", "10", *keys, AIOTENSOR_SECRET_KEY=theirs.secret)

    assert done.exit_code == 0


@pytest.mark.parametrize("wrong", ["the client key", "the server key"])
async def test_wrong_keys_are_a_one_line_error_with_status_1(
    wrong: str, address: str, ours: Pair, theirs: Pair
) -> None:
    known = theirs if wrong == "the client key" else ours
    server = ours if wrong == "the server key" else theirs
    async with TensorReceiver(address, secret_key=theirs.secret, client_keys=[known.public]):
        done = await top(
            *(address, "--patience", "10", "--server-key", server.public), AIOTENSOR_SECRET_KEY=ours.secret
        )

    assert done.exit_code == 1
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith(f"Error: the keys of this process and of the one at {address} do not match")


async def test_a_port_without_a_listener_is_a_one_line_error_with_status_1(address: str) -> None:
    done = await top(address)

    assert done.exit_code == 1
    assert done.stdout == ""
    assert (
        done.stderr
        == f"Error: no receiver or publisher listens at {address}: start it, or inspect another address\n"
    )
