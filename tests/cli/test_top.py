"""Run the command at running receivers, servers and publishers, and test the output of an inspection."""

import asyncio
import json
import os
import pty
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from click.testing import CliRunner, Result

from aiotensor import TensorReceiver, TensorSender
from aiotensor.broadcast import Publisher, SubscriberLag
from aiotensor.channel import MessageClient, MessageServer
from aiotensor.cli.command import aiotensor as command
from aiotensor.cli.top import as_json, as_lines
from aiotensor.inspection import Inspection, SenderInspection
from aiotensor.protocol.frames import Close
from tests.bare_peers import BareReceiver
from tests.broadcast.audiences import Broadcasts
from tests.cli import commands
from tests.frames import receiver_hello, receiver_statistics
from verification.fuzz.listening import waiting_at
from verification.internals import inspectors_of
from verification.patterns import BIG, pattern
from verification.places import free_port
from verification.processes import peers
from verification.waiting import until

ADDRESS = "unix:///run/user/1000/engine.sock"


async def top(*arguments: str, **environment: str) -> Result:
    return await commands.run("top", *arguments, **environment)


@pytest.fixture
def port() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


# Processes that run


async def test_json_contains_the_statistics_and_the_rates(address: str) -> None:
    async with TensorReceiver(address) as receiver, TensorSender(address, 2, 4 << 20) as sender:
        await sender.send(pattern(0, BIG))
        await until(lambda: receiver.statistics().unclaimed_tensors == 1)

        looking = asyncio.create_task(top(address, "--json", "--interval", "1"))
        await until(lambda: len(inspectors_of(receiver)) == 1)  # the first look
        await until(lambda: not inspectors_of(receiver))
        await sender.send(pattern(1, BIG))  # in between
        await anext(receiver)
        done = await looking

        assert (done.stderr, done.exit_code) == ("", 0)
        found = json.loads(done.stdout)
        assert (found["address"], found["kind"]) == (address, "receiver")
        assert (found["id"], found["pid"]) == (receiver.id, os.getpid())
        own = receiver.statistics()
        assert found["statistics"] == {name: getattr(own, name) for name in own.__struct_fields__}
        [one] = found["senders"]
        assert (one["sender"], one["pid"]) == (sender.id, os.getpid())
        assert (one["messages"], one["in_flight"], one["unclaimed_tensors"]) == (2, 1, 1)
        seconds = 1 / one["messages_per_s"]
        assert seconds >= 1
        assert found["rates"] == pytest.approx(
            {"tensors_per_s": 1 / seconds, "bytes_per_s": BIG * 8 / seconds}
        )


async def test_without_a_terminal_top_prints_one_inspection_as_lines(address: str) -> None:
    async with TensorReceiver(address) as receiver, peers.peers(address, 1) as [child]:
        name = await child.call(peers.open_sender, 4, 4 << 20)
        await child.call(peers.send_pattern, 0, BIG)
        await until(lambda: receiver.statistics().unclaimed_tensors == 1)
        await child.stop()  # the receiver alone answers
        done = await top(address, "--patience", "10")
        child.go_on()
        pid = child.pid

    assert (done.stderr, done.exit_code) == ("", 0)
    assert [" ".join(line.split()) for line in done.stdout.splitlines()] == [
        f"receiver pid {os.getpid()} {address}",
        "senders 1/64 lost 0 refused 0 waiting 0 taken -",
        "mapped 4.0M/64.0G unclaimed 1 (781.2K) leases 1 (781.2K)",
        "pid sender in flight messages per s unclaimed leases arena",
        f"{pid} {name[:6]} 1/4 1 - 1 (781.2K) 1 (781.2K) 4.0M",
    ]
    assert "\x1b" not in done.stdout


async def test_the_subscribers_of_a_publisher_are_shown(address: str) -> None:
    async with Broadcasts(address).open(2, slow="drop", max_behind=4) as (publisher, [slow, quick]):
        for number in range(3):
            await publisher.publish(pattern(number, BIG))
            await quick.receive()
        lines = await top(address, "--patience", "10")
        structured = await top(address, "--json", "--patience", "10", "--interval", "0.1")

    first, second, third, names, *rows = lines.stdout.splitlines()
    assert first == f"publisher pid {os.getpid()}  {address}"
    assert second == "subscribers 2/64   lost 0   refused 0   dropped 0   waiting 0"
    assert third.endswith("kept 0   publications 3 (2.3M)   published -")
    assert names.split() == ["pid", "subscriber", "behind", "for", "memory", "delivered", "dropped"]
    assert [row.split()[1:3] for row in rows] == [[slow.id[:6], "3/4"], [quick.id[:6], "0/4"]]
    found = json.loads(structured.stdout)
    assert (found["address"], found["id"]) == (address, publisher.id)
    assert [lag["subscriber"] for lag in found["statistics"]["lags"]] == [slow.id, quick.id]
    assert found["rates"] == {"publications_per_s": 0.0, "bytes_per_s": 0.0}


async def test_the_messages_of_a_server_are_shown(address: str) -> None:
    async with MessageServer(address, dict) as server, MessageClient(address, int, 2, 4 << 20) as client:
        await client.send({"frames": pattern(0, BIG)})
        await client.send({})
        async with await anext(server):
            lines = await top(address, "--patience", "10")

    assert (lines.stderr, lines.exit_code) == ("", 0)
    assert lines.stdout.splitlines() == [
        f"server pid {os.getpid()}  {address}",
        "clients 1/64   lost 0   refused 0   waiting 1   taken -",
        "mapped 4.0M/64.0G   leases 1   memory 0B/1.0G   answers 0   failures 0   cancelled 0",
    ]


# On a terminal


class Screen:
    """The command on a terminal, and its output."""

    def __init__(self, process: "subprocess.Popen[bytes]", leader: int) -> None:
        self.process = process
        self.written = b""
        self._leader = leader

    async def until(self, *words: str) -> None:
        """Wait until all these words were written since the last time."""
        since = len(self.written)
        while not all(word.encode() in self.written[since:] for word in words):
            await asyncio.to_thread(self._read)

    async def ended(self) -> int:
        """Read to the end, and return the exit status."""
        while await asyncio.to_thread(self._read):
            pass
        return await asyncio.to_thread(self.process.wait)

    def _read(self) -> bool:
        try:
            read = os.read(self._leader, 1 << 16)
        except OSError:  # what Linux says once the other end is closed
            return False
        self.written += read
        return bool(read)


@contextmanager
def terminal(*arguments: str, **environment: str) -> Iterator[Screen]:
    """Run the command on a terminal of 80 columns."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "COLUMNS": "80", "LINES": "24", "TERM": "xterm", **environment}
    process = subprocess.Popen(
        commands.aiotensor("top", *arguments),
        stdin=follower,
        stdout=follower,
        stderr=subprocess.PIPE,
        env=environment,
    )
    os.close(follower)
    try:
        with process:
            yield Screen(process, leader)
            assert process.stderr is not None
            assert process.stderr.read() == b""
    finally:
        process.kill()
        os.close(leader)


async def test_the_live_view_follows_successive_receivers_and_ends_on_ctrl_c(address: str) -> None:
    with terminal(address, "--interval", "0.05") as screen:
        await screen.until(f"no process listens at {address}", "waiting for the next one")
        async with TensorSender(address) as sender:
            for number in range(2):
                async with TensorReceiver(address) as receiver:
                    await until(lambda receiver=receiver: receiver.statistics().senders == 1)  # type: ignore[misc]
                    await sender.send(pattern(number, BIG))
                    await screen.until(f"pid {os.getpid()}", sender.id[:6], "1 (781.2K)")
                    await anext(receiver)
                    await sender.drain()
                await screen.until("no process listens")
        screen.process.send_signal(signal.SIGINT)
        assert await screen.ended() == 0
        assert b"Aborted" not in screen.written


async def test_the_live_view_restores_the_terminal_on_sigterm(address: str) -> None:
    with terminal(address) as screen:
        await screen.until("waiting for the next one")
        screen.process.terminate()
        assert await screen.ended() == 143
        # These sequences restore the cursor and the previous screen. The last result stays below it.
        _, _, after = screen.written.partition(b"\x1b[?25h\x1b[?1049l")
        assert b"waiting for the next one" in after


# Errors


async def test_a_missing_receiver_is_a_one_line_error_with_status_1(address: str, port: str) -> None:
    missing = f"{address}.folder/engine.sock"
    folder = missing.removeprefix("unix://").rpartition("/")[0]
    for where, why in (
        (address, "start it, or inspect another address"),
        (port, "start it, or inspect another address"),
        (missing, f"the folder {folder} does not exist"),
    ):
        done = await top(where, "--patience", "0.1")
        assert (done.exit_code, done.stdout) == (1, "")
        assert done.stderr == f"Error: no process listens at {where}: {why}\n"


async def test_control_characters_in_a_refusal_are_not_printed(address: str) -> None:
    with waiting_at(address) as listener:
        running = asyncio.create_task(top(address, "--patience", "60"))
        sock, _ = await asyncio.get_running_loop().sock_accept(listener)
        with sock:
            sock.setblocking(False)
            rogue = BareReceiver(sock)
            await rogue.say(receiver_hello(), Close("\x1b[31mred\x1b]0;title\x07\nError: all is well"))
            done = await running
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == (
        f"Error: the connection to the process at {address} (pid 7) was lost: it closed the connection: "
        "?[31mred?]0;title??Error: all is well\n"
    )


@pytest.mark.parametrize("address", ["engine.sock", "unix://engine.sock", "unix:///run/", "tcp://host", ""])
def test_an_invalid_address_is_rejected(address: str) -> None:
    result = CliRunner().invoke(command, ["top", address])

    assert result.exit_code == 2
    assert "unix:///PATH" in result.output.replace("\n", "")


# Keys


# What is written


def of_sender(name: str, messages: int) -> SenderInspection:
    return SenderInspection(name * 32, 4194303, 8, 1 << 30, messages, 8, 999, 999 << 20, 3, 100 << 20)


def look(at: float, *senders: SenderInspection, receiver: str = "r", **changes: object) -> Inspection:
    return Inspection("receiver", receiver, 4194301, receiver_statistics(**changes), senders, at)


def plain(lines: list[str]) -> list[str]:
    return [lines[0].removeprefix("\x1b[1m").removesuffix("\x1b[0m"), *lines[1:]]


def test_the_screen_shows_the_receiver_its_senders_and_the_rates() -> None:
    before = look(2.0, of_sender("a", 500), tensors_taken=10, bytes_taken=0)
    now = look(
        *(12.0, of_sender("a", 1500), of_sender("b", 7)),
        senders=2,
        max_senders=None,
        senders_lost=1,
        waiting=4,
        mapped_bytes=3 << 30,
        max_mapped_bytes=None,
        tensors_taken=110,
        bytes_taken=100 << 20,
    )
    lines = plain(as_lines(ADDRESS, before, now, 80, 24))

    assert lines[:3] == [
        f"receiver pid 4194301  {ADDRESS}",
        "senders 2   lost 1   refused 0   waiting 4   taken 10.0/s (10.0M/s)",
        "mapped 3.0G   unclaimed 0   leases 0",
    ]
    assert [" ".join(line.split()) for line in lines[3:]] == [
        "pid sender in flight messages per s unclaimed leases arena",
        "4194303 aaaaaa 8/8 1500 100.0 999 (999.0M) 3 (100.0M) 1.0G",
        "4194303 bbbbbb 8/8 7 - 999 (999.0M) 3 (100.0M) 1.0G",
    ]
    assert len({len(line) for line in lines[3:]}) == 1
    assert max(map(len, lines)) <= 80


def test_subscribers_that_a_publisher_does_not_report_are_counted() -> None:
    statistics = Publisher("unix:///nowhere/s").statistics()
    lags = tuple(SubscriberLag(f"{number:032}", 100 + number, 3, 1.5, 1 << 20, 5, 2) for number in range(5))
    fields = {name: getattr(statistics, name) for name in statistics.__struct_fields__}
    fields |= {"lags": lags, "subscribers": 150, "waiting": 2, "longest_wait_s": 3.25}
    now = Inspection("publisher", "p", 7, type(statistics)(**fields), (), 1.0)
    lines = plain(as_lines(ADDRESS, None, now))

    assert "waiting 2 (3.2 s)" in lines[1]
    assert lines[4].split() == ["100", "000000", "3/8", "1.5", "s", "1.0M", "5", "2"]
    assert lines[-1] == "and 145 more"


def test_rates_need_an_earlier_inspection_of_the_same_receiver() -> None:
    now = look(12.0, of_sender("a", 1500))

    for before in (look(12.0, of_sender("a", 1)), look(2.0, of_sender("a", 1), receiver="another")):
        found: dict[str, Any] = json.loads(as_json(ADDRESS, before, now))
        assert found["rates"] == {"tensors_per_s": None, "bytes_per_s": None}
        assert found["senders"][0]["messages_per_s"] is None
