"""Run the command at running receivers, and test the output of an inspection."""

import asyncio
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from aiotensor import TensorReceiver, TensorSender
from aiotensor.channel import MessageServer
from aiotensor.cli.command import aiotensor as command
from aiotensor.cli.top.report import Rate, as_json, as_lines, rates
from aiotensor.cli.top.view import as_screen, missing
from aiotensor.cli.words import brief, short
from aiotensor.inspection import Inspection, SenderInspection
from aiotensor.protocol.connection import Close
from aiotensor.protocol.frames import VERSION, Welcome
from aiotensor.types import Holder, ReceiverStatistics, SenderStatistics
from tests.bare_peers import BareReceiver
from tests.cli import commands
from tests.frames import NO_WAITS
from verification.fuzz.listening import waiting_at
from verification.internals import inspectors_of
from verification.patterns import BIG, pattern
from verification.processes import peers
from verification.waiting import until

ADDRESS = "unix:///run/user/1000/engine.sock"


async def run(*arguments: str) -> Result:
    """Run the command in another thread, which does not block the loop."""
    return await asyncio.to_thread(CliRunner().invoke, command, ["top", *arguments])


@contextmanager
def begun(*arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Start the command in a separate process, which is killed at the end of the block."""
    command_line = commands.aiotensor("top", *arguments)
    with subprocess.Popen(command_line, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


# A receiver that runs


async def test_json_contains_the_statistics_and_the_rates_of_senders(
    address: str,
) -> None:
    async with TensorReceiver(address) as receiver, TensorSender(address, 2, 4 << 20) as sender:
        await sender.send(pattern(0, BIG))
        await until(lambda: receiver.statistics().unclaimed_tensors == 1)

        looking = asyncio.create_task(run(address, "--json", "--interval", "1"))
        await until(lambda: len(inspectors_of(receiver)) == 1)  # the first look
        await until(lambda: not inspectors_of(receiver))
        await sender.send(pattern(1, BIG))  # in between
        done = await looking

        assert done.stderr == ""
        assert done.exit_code == 0
        found = json.loads(done.stdout)
        assert (found["address"], found["receiver"], found["pid"]) == (address, receiver.id, os.getpid())
        own = receiver.statistics()
        assert found["statistics"] == {name: getattr(own, name) for name in own.__struct_fields__}
        [one] = found["senders"]
        assert (one["sender"], one["pid"]) == (sender.id, os.getpid())
        assert one["unclaimed_tensors"] == 2
        assert one["statistics"]["bytes_in_use"] == sender.statistics().bytes_in_use
        assert [holder["message"] for holder in one["statistics"]["holders"]] == [0, 1]
        seconds = BIG * 8 / one["sent"]["bytes_per_s"]
        assert seconds >= 1
        assert one["sent"]["messages_per_s"] == pytest.approx(1 / seconds)


async def test_without_a_terminal_top_prints_one_inspection_as_lines(address: str) -> None:
    async with TensorReceiver(address) as receiver, peers.peers(address, 1) as [child]:
        name = await child.call(peers.open_sender, 4, 4 << 20)
        await child.call(peers.send_pattern, 0, BIG)
        await until(lambda: receiver.statistics().unclaimed_tensors == 1)

        done = await run(address, "--patience", "10")
        await child.stop()
        stopped = await run(address, "--patience", "1")
        child.go_on()

        assert done.stderr == stopped.stderr == ""
        assert done.exit_code == stopped.exit_code == 0
        first, second, third = done.stdout.splitlines()
        assert first.startswith(
            f"receiver pid {os.getpid()} at {address}: 1 of 64 senders, 4.0 MiB of 64.0 GiB"
        )
        assert second.startswith(f"sender pid {child.pid} ({name[:6]}): 1 of 4 permits, 781.2 KiB of 4.0 MiB")
        assert "no call waits, 1 message (781.2 KiB) sent, 1 tensor (781.2 KiB) unclaimed" in second
        assert third.startswith(f"pid {child.pid} message 0, waiting to be taken, 781.2 KiB, ")
        assert "\x1b" not in done.stdout
        _, silent = stopped.stdout.splitlines()
        assert silent.startswith(f"sender pid {child.pid} ({name[:6]}): does not answer, 1 tensor")


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
def terminal(*command_line: str, **environment: str) -> Iterator[Screen]:
    """Run a command on a terminal of 80 columns."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "COLUMNS": "80", "LINES": "24", "TERM": "xterm", **environment}
    process = subprocess.Popen(
        command_line, stdin=follower, stdout=follower, stderr=subprocess.PIPE, env=environment
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
    with terminal(*commands.aiotensor("top", address, "--interval", "0.05")) as screen:
        await screen.until(f"no receiver or publisher listens at {address}", "waiting for the next one")
        async with TensorSender(address) as sender:
            for number in range(2):
                async with TensorReceiver(address) as receiver:
                    await until(lambda receiver=receiver: receiver.statistics().senders == 1)  # type: ignore[misc]
                    await sender.send(pattern(number, BIG))
                    await screen.until(f"pid {os.getpid()}", sender.id[:6], f"message {number}", "781K")
                    await anext(receiver)
                    await sender.drain()
                await screen.until("no receiver or publisher listens")
        screen.process.send_signal(signal.SIGINT)
        assert await screen.ended() == 0
        assert b"Aborted" not in screen.written


async def test_the_live_view_restores_the_terminal_on_sigterm(address: str) -> None:
    with terminal(*commands.aiotensor("top", address)) as screen:
        await screen.until("waiting for the next one")
        screen.process.terminate()
        assert await screen.ended() == 143
        # These sequences restore the cursor and the previous screen. The last result stays below it.
        _, _, after = screen.written.partition(b"\x1b[?25h\x1b[?1049l")
        assert b"waiting for the next one" in after


@pytest.mark.parametrize(
    ("name", "value"),
    [("TERM", "dumb"), ("TTY_COMPATIBLE", "0"), ("TTY_INTERACTIVE", "0"), ("FORCE_COLOR", "")],
)
async def test_on_a_dumb_terminal_top_prints_one_inspection_as_lines(
    name: str, value: str, address: str
) -> None:
    async with TensorReceiver(address):
        with terminal(*commands.aiotensor("top", address), **{name: value}) as screen:
            assert await screen.ended() == 0
    assert screen.written.decode().startswith(f"receiver pid {os.getpid()} at {address}: 0 of 64 senders")
    assert b"\x1b" not in screen.written


async def test_without_rich_top_prints_one_inspection_as_lines(address: str) -> None:
    code = "import sys; sys.modules['rich'] = None; from aiotensor.cli import main; main()"
    async with TensorReceiver(address):
        with terminal(sys.executable, "-W", "error", "-c", code, "top", address) as screen:
            assert await screen.ended() == 0
    assert screen.written.decode().startswith(f"receiver pid {os.getpid()} at {address}: 0 of 64 senders")
    assert b"\x1b" not in screen.written


async def test_a_missing_receiver_is_a_one_line_error_with_status_1(address: str) -> None:
    for arguments in ((), ("--json",)):
        done = await run(address, *arguments)
        assert done.exit_code == 1
        assert done.stdout == ""
        assert (
            done.stderr
            == f"Error: no receiver or publisher listens at {address}: start it, or inspect another address\n"
        )


async def test_the_error_about_a_missing_receiver_names_a_missing_folder(address: str) -> None:
    folder = f"{address.removeprefix('unix://')}.folder"
    done = await run(f"unix://{folder}/engine.sock")

    assert done.exit_code == 1
    assert done.stderr == (
        f"Error: no receiver or publisher listens at unix://{folder}/engine.sock: the folder {folder} does "
        "not exist\n"
    )


async def test_the_socket_of_a_message_server_is_identified(address: str) -> None:
    async with MessageServer(address.replace("unix:", "ipc:"), int):
        done = await run(address)

    assert done.exit_code == 1
    assert "is not that of a receiver or publisher: a MessageServer, for example, has" in done.stderr


def test_the_address_of_a_message_server_is_rejected_with_an_explanation() -> None:
    result = CliRunner().invoke(command, ["top", "ipc:///run/engine.messages"])

    assert result.exit_code == 2
    assert "is the address of a MessageServer, which cannot be inspected" in " ".join(result.output.split())


async def test_control_characters_in_a_refusal_are_not_printed(address: str) -> None:
    with waiting_at(address) as listener:
        running = asyncio.create_task(run(address, "--patience", "60"))
        sock, _ = await asyncio.get_running_loop().sock_accept(listener)
        with sock:
            sock.setblocking(False)
            rogue = BareReceiver(sock)
            await rogue.say(Welcome(VERSION, 7), Close("\x1b[31mred\x1b]0;title\x07\nError: all is well"))
            done = await running
    assert done.exit_code == 1
    assert done.stdout == ""
    assert done.stderr == (
        "Error: the connection to the receiver (pid 7) was lost: it closed the connection: "
        "?[31mred?]0;title??Error: all is well\n"
    )


async def test_a_lack_of_descriptors_is_a_one_line_error(address: str) -> None:
    code = """
import os, resource
from aiotensor.cli import main
import aiotensor.cli.command
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
taken = []
try:
    while True:
        taken.append(os.dup(0))
except OSError:
    for _ in range(3):  # what an event loop needs
        os.close(taken.pop())
main()
"""
    command_line = [sys.executable, "-W", "error", "-c", code, "top", address]
    done = await asyncio.to_thread(subprocess.run, command_line, capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == "Error: the inspection failed: Too many open files\n"


@pytest.mark.parametrize("arguments", [(), ("--json",)])
async def test_ctrl_c_before_anything_is_written_is_status_130(
    arguments: tuple[str, ...], address: str
) -> None:
    with waiting_at(address) as listener, begun(address, "--patience", "60", *arguments) as process:
        sock, _ = await asyncio.get_running_loop().sock_accept(listener)
        with sock:
            process.send_signal(signal.SIGINT)
            written = await asyncio.to_thread(process.communicate)
    assert (process.returncode, written) == (130, (b"", b""))


@pytest.mark.parametrize("address", ["engine.sock", "unix://engine.sock", "unix:///run/", "tcp://host", ""])
def test_an_invalid_address_is_rejected(address: str) -> None:
    result = CliRunner().invoke(command, ["top", address])

    assert result.exit_code == 2
    assert "unix:///PATH" in result.output.replace("\n", "")


@pytest.mark.parametrize("option", ["--interval", "--patience"])
@pytest.mark.parametrize("time", ["0", "-1", "nan", "inf", "soon"])
def test_an_invalid_time_is_a_usage_error_that_names_the_option(option: str, time: str) -> None:
    result = CliRunner().invoke(command, ["top", ADDRESS, option, time])

    assert result.exit_code == 2
    assert option in result.output


# What is written


HOLDERS = (
    Holder(7, "waiting to be taken", 42 << 20, 63.12),
    Holder(None, "allocated", 1 << 20, 13.12),
    Holder(8, "taken, its tensors still in use", 42 << 20, 3.12),
)
RECEIVER = ReceiverStatistics(
    *(3, 64, 1, 2, 0, 1100, 3 << 30, 3 << 30, 64 << 30, 13, 1024, 7, 300 << 20, 1, 1, 1, 1, 0, 0, {})
)


def _of_sender(
    sender: str, waiting: int, longest_wait_s: float, holders: tuple[Holder, ...], sent: int, at: float
) -> SenderInspection:
    statistics = SenderStatistics(
        *(8, 8 if waiting else 2, 8, waiting, longest_wait_s, holders),
        *(1 << 30, 700 << 20, 700 << 20, 700 << 20, 300 << 20, sent, 0, sent, sent << 20, 0),
        *(NO_WAITS, NO_WAITS, 0, 0, {}),
    )
    return SenderInspection(sender * 32, 4194303, 8, 1 << 30, 999, 999 << 20, 3, 100 << 20, statistics, at)


def _look(sent: int, at: float) -> Inspection:
    silent = SenderInspection("c" * 32, 218, 8, 1 << 30, 0, 0, 0, 0, None, None)
    senders = (
        _of_sender("a", 12, 123.4, HOLDERS, sent, at),
        _of_sender("b", 0, 0.0, (Holder(9, "being sent", 0, 5.0),), 0, at),
        silent,
    )
    return Inspection("d" * 32, 4194301, RECEIVER, senders)


def _drawn(now: Inspection, *, width: int, height: int = 40, before: Inspection | None = None) -> list[str]:
    console = Console(width=width, height=height, record=True, file=io.StringIO())
    console.print(as_screen(ADDRESS, before, now, height))
    return [line.rstrip() for line in console.export_text().splitlines()]


@pytest.mark.parametrize("width", [80, 200])
def test_the_screen_fits_a_terminal_of_80_columns(width: int) -> None:
    lines = _drawn(_look(1500, 12.0), before=_look(500, 2.0), width=width)

    assert lines[0] == f"receiver pid 4194301  {ADDRESS}"
    assert lines[1] == "senders 3/64   lost 1   refused 2"
    assert lines[2] == "mapped 3.0G/64.0G   unclaimed 1100 (3.0G)   leases 7 (300M)"
    assert [" ".join(line.split()) for line in lines[4:8]] == [
        "pid sender permits memory sent/s msgs/s wait longest unclaimed",
        "4194303 aaaaaa 8/8 700M/1.0G 100M 100 12 123 s 999 (999M)",
        "4194303 bbbbbb 2/8 700M/1.0G 0B 0.0 0 - 999 (999M)",
        "218 cccccc ?/8 ?/1.0G silent - - - 0",
    ]
    assert lines[9] == "held for longest"
    assert [re.split(r"  +", line) for line in lines[10:]] == [
        ["pid 4194303", "message 7", "waiting to be taken", "42.0M", "63.1 s"],
        ["pid 4194303", "no message yet", "allocated", "1.0M", "13.1 s"],
        ["pid 4194303", "message 9", "being sent", "0B", "5.0 s"],
        ["pid 4194303", "message 8", "taken, its tensors still in use", "42.0M", "3.1 s"],
    ]
    assert "…" not in "".join(lines)


@pytest.mark.parametrize(
    ("width", "headings"),
    [
        (70, "pid permits memory sent/s msgs/s wait longest unclaimed"),
        (52, "pid permits memory sent/s wait longest"),
        (20, "pid permits"),
    ],
)
def test_columns_that_do_not_fit_a_narrow_terminal_are_omitted(width: int, headings: str) -> None:
    lines = _drawn(_look(1500, 12.0), before=_look(500, 2.0), width=width)

    assert " ".join(lines[4].split()) == headings
    assert "…" not in "".join(lines[4:8])


def test_holders_that_do_not_fit_on_the_screen_are_counted() -> None:
    lines = _drawn(_look(0, 0.0), width=80, height=14)

    assert len(lines) <= 14
    assert lines[-1] == "and 1 more"


@pytest.mark.parametrize("holds", [True, False])
@pytest.mark.parametrize("height", [14, 15, 24])
def test_senders_that_do_not_fit_on_the_screen_are_counted(holds: bool, height: int) -> None:
    holders = HOLDERS if holds else ()
    senders = tuple(_of_sender("a", 0, 0.0, holders, 0, 0.0) for _ in range(40))
    lines = _drawn(Inspection("d" * 32, 7, RECEIVER, senders), width=80, height=height)

    shown = sum("aaaaaa" in line for line in lines)
    assert shown > 0
    assert len(lines) == height
    assert lines[5 + shown] == f"and {40 - shown} more"
    if holds:
        assert lines[7 + shown] == "held for longest"
        assert lines[-1] == f"and {120 - (height - 9 - shown)} more"


@pytest.mark.parametrize(("width", "address"), [(80, f"unix:///{'x' * 90}"), (30, ADDRESS)])
def test_lines_wider_than_the_terminal_do_not_wrap(width: int, address: str) -> None:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(as_screen(address, None, _look(0, 0.0), 14))
    lines = console.export_text().splitlines()

    assert len(lines) == 14
    assert [line.split()[0] for line in lines[:3]] == ["receiver", "senders", "mapped"]
    assert lines[-1].rstrip() == "and 1 more"


@pytest.mark.parametrize(("height", "shown"), [(12, 3), (11, 1)])
def test_senders_are_omitted_only_if_they_do_not_fit_on_the_screen(height: int, shown: int) -> None:
    lines = _drawn(_look(0, 0.0), width=80, height=height)

    assert len(lines) == height
    assert sum(name * 6 in "".join(lines) for name in "abc") == shown


def test_a_receiver_without_senders_or_limits_is_displayed() -> None:
    statistics = ReceiverStatistics(0, None, 0, 0, 0, 0, 0, 0, None, 0, None, 0, 0, 0, 0, 0, 0, 0, 0, {})
    now = Inspection("d" * 32, 7, statistics, ())

    assert _drawn(now, width=80)[1:] == [
        "senders 0   lost 0   refused 0",
        "mapped 0B   unclaimed 0   leases 0",
        "",
        "no sender is connected",
    ]
    assert as_lines(ADDRESS, now).startswith(
        f"receiver pid 7 at {ADDRESS}: 0 senders, 0 bytes mapped, 0 tensors"
    )


def test_the_rate_of_a_sender_needs_two_answers() -> None:
    before, now = _look(500, 2.0), _look(1500, 12.0)

    assert rates(before, now) == {"a" * 32: Rate(100 << 20, 100.0), "b" * 32: Rate(0.0, 0.0)}
    assert rates(None, now) == {}
    assert rates(now, now) == {}  # no time has passed
    sent = {one["sender"][0]: one["sent"] for one in json.loads(as_json(ADDRESS, before, now))["senders"]}
    assert sent == {
        "a": {"bytes_per_s": 100 << 20, "messages_per_s": 100.0},
        "b": {"bytes_per_s": 0.0, "messages_per_s": 0.0},
        "c": None,
    }


def test_control_characters_in_statistics_are_not_printed() -> None:
    holder = Holder(1, "\x1b]0;title\x07", 1, 1.0)
    sender = _of_sender("\x1b", 0, 0.0, (holder,), 0, 1.0)
    now = Inspection("d", 7, RECEIVER, (sender,))

    for written in ("\n".join(_drawn(now, width=80)), as_lines(ADDRESS, now)):
        assert "??????" in written
        assert "?]0;title?" in written
        assert "\x1b" not in written
    assert "\x1b" not in json.dumps(as_json(ADDRESS, None, now))


def test_nan_in_statistics_raises_value_error_in_json_output() -> None:
    sender = _of_sender("a", 0, float("nan"), (), 0, 1.0)

    with pytest.raises(ValueError, match="JSON"):
        as_json(ADDRESS, None, Inspection("d", 7, RECEIVER, (sender,)))


def test_the_screen_reports_a_missing_receiver_and_the_search_for_it() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(missing("no receiver or publisher listens at [red]"))
    assert (
        console.export_text() == "no receiver or publisher listens at [red]\nwaiting for the next one ...\n"
    )


@pytest.mark.parametrize(
    ("nbytes", "written"),
    [(0, "0B"), (1023, "1023B"), (1536, "1.5K"), (0.4, "0B"), (99.9 * (1 << 20), "99.9M"), (1 << 29, "512M")],
)
def test_bytes_are_abbreviated_on_the_screen(nbytes: float, written: str) -> None:
    assert short(nbytes) == written


@pytest.mark.parametrize(
    ("amount", "written"), [(0.0, "0.0"), (99.94, "99.9"), (99.96, "100"), (1234.5, "1234")]
)
def test_small_numbers_are_written_with_one_decimal_digit(amount: float, written: str) -> None:
    assert brief(amount) == written
