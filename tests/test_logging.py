"""Log records: one line of plain text per event, with its facts as fields."""

import asyncio
import contextlib
import io
import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from aiotensor import RemoteError, TensorReceiver, TensorSender
from aiotensor.channel import MessageServer
from aiotensor.protocol.frames import INLINE, Content, Message, encode
from aiotensor.runtime.logs import MAX_TEXT, logger_of, one_line
from tests.channel.parties import Question, answer, channel, place
from tests.frames import hello
from verification.patterns import BIG, pattern
from verification.processes.peers import open_receiver, peers
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

ROOT = Path(__file__).parent.parent
OF_EVERY_RECORD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}

# A text with which a peer could forge a log line or control a terminal.
FORGED = "so it is\n2026-01-01 CRITICAL aiotensor: forged\r\x1b[2J\x85\u2028\u202e"


class Event(NamedTuple):
    """The facts of a log record. A kept record would keep its exception, whose traceback holds tensors."""

    event: str
    level: str
    logger: str
    message: str
    fields: dict[str, object]
    parts: tuple[object, ...]  # of the message


@contextmanager
def heard() -> Iterator[list[Event]]:
    """Collect the log records, and check that each is one line of plain text."""
    events: list[Event] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            parts = record.args if isinstance(record.args, tuple) else ()
            fields = {name: value for name, value in vars(record).items() if name not in OF_EVERY_RECORD}
            event = str(fields.pop("event"))
            events.append(Event(event, record.levelname, record.name, record.getMessage(), fields, parts))

    logger = logging.getLogger("aiotensor")
    listener, level = Listener(), logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield events
    finally:
        logger.propagate = True
        logger.setLevel(level)
        logger.removeHandler(listener)
    for event in events:
        assert event.message.isprintable()
        for value in (*event.fields.values(), *event.parts):
            assert isinstance(value, int | float | str | None)
            assert not isinstance(value, str) or (value.isprintable() and len(value) <= MAX_TEXT)


def _one(events: list[Event], name: str) -> Event:
    (event,) = (event for event in events if event.event == name)
    return event


async def test_a_lost_receiver_is_logged_with_its_pid_and_the_lost_messages(address: str) -> None:
    with heard() as events:
        async with peers(address, 1) as (engine,):
            await engine.call(open_receiver)
            async with TensorSender(address) as sender:
                await sender.send(pattern(0, BIG))
                await until(lambda: sender.receiver_id is not None)
                engine.kill()
                await until(lambda: any(event.event == "peer_lost" for event in events))
                pid = engine.pid
        os.unlink(address.removeprefix("unix://"))
    lost = _one(events, "peer_lost")
    assert (lost.logger, lost.level) == ("aiotensor.sender", "WARNING")
    assert str(lost.fields.pop("reason")) in lost.message
    assert lost.fields == {"address": address, "peer_pid": pid, "messages_lost": 1}


@pytest.mark.promise(17)
@pytest.mark.parametrize("wanted", ["a permit", f"{BIG * 8} bytes of shared memory"])
async def test_a_long_wait_is_logged_once_and_its_holders_are_in_the_statistics(
    wanted: str, address: str
) -> None:
    permits = 1 if wanted == "a permit" else 2
    with heard() as events:
        async with (
            TensorReceiver(address) as receiver,
            TensorSender(address, permits, BIG * 8, long_wait_s=0.01) as sender,
        ):
            held = await sender.send(pattern(0, BIG))
            await until(lambda: sender.receiver_id is not None)
            waiting = asyncio.create_task(sender.send(pattern(1, BIG)))
            await until(lambda: bool(events))
            assert sender.statistics().longest_wait_s > 0
            holder = sender.statistics().holders[0]
            assert (holder.message, holder.state, holder.bytes) == (0, "waiting to be taken", BIG * 8)
            assert holder.seconds > 0
            await asyncio.sleep(0.03)  # no second line comes
            await receiver.receive(held)
            await receiver.receive(await waiting)
            assert sender.statistics().longest_wait_s == 0
    wait = _one(events, "long_wait")
    assert wait.level == "WARNING"
    held_by = wait.fields.pop("held_by")
    assert re.match(rf"message 0 \(waiting to be taken, {BIG * 8} bytes, \d+\.\d s\)", str(held_by))
    # A send that waits for memory holds a permit.
    facts = {"waited_s": 0.01, "waited_for": wanted, "peer_pid": os.getpid(), "holders": permits}
    assert wait.fields == facts


@pytest.mark.promise(17)
async def test_a_long_wait_of_a_request_is_logged_once_with_the_holders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aiotensor.channel.client._LONG_WAIT_S", 0.01)
    with heard() as events:
        async with channel(max_concurrent_videos=1) as ends:
            asking = [asyncio.create_task(ends.client.request(Question(seed))) for seed in range(2)]
            await until(lambda: any(event.event == "long_wait" for event in events))
            serving = asyncio.create_task(ends.server.serve(answer))
            assert [one.seed for one in await asyncio.gather(*asking)] == [0, 1]
            await ends.server.aclose()
            await serving
    wait = _one(events, "long_wait")
    assert (wait.logger, wait.level) == ("aiotensor.client", "WARNING")
    assert re.match(r"a message \((waiting to be taken|being sent), 0 bytes, ", str(wait.fields["held_by"]))
    assert (wait.fields["waited_for"], wait.fields["holders"]) == ("a permit", 1)


@contextmanager
def _rogue(address: str, peer: str, **changes: object) -> Iterator[socket.socket]:
    """Connect a bare socket to a receiver or a server, and send a hello."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.setblocking(False)
        sock.connect(address.removeprefix("unix://"))
        sock.send(encode(hello(pid=4711, id=peer, **changes)))
        yield sock


async def test_a_sender_cannot_forge_a_line_by_its_id_or_its_frames(address: str) -> None:
    name = f"me\n{'x' * 20}\x1b[31m"
    with heard() as events:
        async with TensorReceiver(address, max_senders=1) as receiver:
            with _rogue(address, name) as rogue:
                await until(lambda: receiver.statistics().senders == 1)
                with _rogue(address, f"{name} too"):
                    await until(lambda: receiver.statistics().senders_refused == 1)
                rogue.send(msgspec.msgpack.encode([[FORGED]]))
                await until(lambda: receiver.statistics().senders_lost == 1)
    refused, broken = _one(events, "peer_refused"), _one(events, "protocol_broken")
    escaped = f"me\\n{'x' * 20}\\x1b[31m"
    assert (refused.fields["peer"], refused.fields["peer_pid"]) == (f"sender {escaped} too", 4711)
    assert (broken.fields["peer"], broken.fields["peer_pid"]) == (f"sender {escaped}", 4711)
    assert f"sender {escaped} (pid 4711) broke the protocol" in broken.message
    assert "so it is\\n2026-01-01 CRITICAL" in str(broken.fields["reason"])
    assert (broken.logger, broken.level) == ("aiotensor.receiver", "ERROR")


async def _counted(receiver: TensorReceiver, count: int, name: str) -> None:
    await until(lambda: getattr(receiver.statistics(), name) == count)


async def test_repeated_refusals_share_a_log_line_with_their_count(address: str) -> None:
    with heard() as events:
        async with TensorReceiver(address, max_senders=1) as receiver:
            with _rogue(address, "admitted") as rogue:
                await until(lambda: receiver.statistics().senders == 1)
                for number in range(10):
                    with _rogue(address, f"refused {number}"):
                        await _counted(receiver, number + 1, "senders_refused")
                rogue.send(b"nonsense")
                await _counted(receiver, 1, "senders_lost")
            for number in range(5):
                with _rogue(address, f"broken {number}") as rogue:
                    rogue.send(b"nonsense")
                    await _counted(receiver, number + 2, "senders_lost")
    for name, first, latest, count in (
        ("peer_refused", "refused 0", "refused 9", 10),
        ("protocol_broken", "admitted", "broken 4", 6),
    ):
        lines = [event.fields for event in events if event.event == name]
        assert (lines[0]["peer"], lines[0]["count"]) == (f"sender {first}", 1)
        assert lines[-1]["peer"] == f"sender {latest}"
        assert sum(map(int, map(str, (line["count"] for line in lines)))) == count
        assert len(lines) < count
    text = next(event.message for event in events if str(event.fields.get("count", 1)) != "1")
    assert re.search(r" \(the latest of \d+ since the last such line\)$", text)


class Wish(Enum):
    """The valid wishes; the error for any other wish lists them."""

    SOME = "some"


async def test_a_request_whose_handler_raises_is_logged_in_one_line() -> None:
    async def fail(question: Question) -> None:
        raise ValueError(f"no answer to {question.seed}: {question.wish}")

    with heard() as events:
        async with channel() as ends:
            serving = asyncio.create_task(ends.server.serve(fail))
            with pytest.raises(RemoteError, match="no answer to 5"):
                await ends.client.request(Question(5, wish=FORGED))
            await ends.server.aclose()
            await serving
    failed = _one(events, "request_failed")
    assert (failed.logger, failed.level) == ("aiotensor.server", "ERROR")
    assert str(failed.fields.pop("reason")).startswith("no answer to 5: so it is\\n2026")
    assert failed.fields == {"peer_pid": os.getpid(), "error": "ValueError"}


async def test_a_client_cannot_forge_a_line_by_its_messages() -> None:
    content = msgspec.msgpack.encode(Content(memoryview(msgspec.msgpack.encode({"wish": FORGED}))))
    kind = msgspec.defstruct("Kind", [("wish", Wish)])
    with heard() as events, place() as here:
        async with MessageServer(here, kind) as server:
            taking = asyncio.create_task(anext(server))
            with _rogue(here, "c", role="client") as rogue:
                rogue.send(encode(Message(0, INLINE, content, len(content), asks=True)))
                await until(lambda: server.statistics().failures == 1)
                rogue.send(msgspec.msgpack.encode([[FORGED]]))
                await until(lambda: server.statistics().clients_lost == 1)
            taking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await taking
    refused, broken = _one(events, "message_refused"), _one(events, "protocol_broken")
    assert broken.message.startswith("client c (pid 4711) broke the protocol: ")
    for event in (refused, broken):
        assert event.fields["peer_pid"] == 4711
        assert "so it is\\n2026-01-01 CRITICAL" in str(event.fields["reason"])
    assert (refused.fields["error"], refused.level) == ("ProtocolError", "ERROR")


def test_unprintable_characters_are_escaped_and_a_long_text_is_cut() -> None:
    for text, line in {
        "plain text, äöü 漢字": "plain text, äöü 漢字",
        "two\nlines": "two\\nlines",
        "\x1b[2J": "\\x1b[2J",
        "\x85\u2028\u2029\u202e": "\\x85\\u2028\\u2029\\u202e",
        "\udcff": "\\udcff",
        "": "",
        "x" * MAX_TEXT: "x" * MAX_TEXT,
    }.items():
        assert one_line(text) == line
    cut = one_line("x" * (MAX_TEXT + 1))
    assert len(cut) == MAX_TEXT
    assert cut.endswith("x...")


def test_a_traceback_has_the_lines_of_its_calls_and_no_other() -> None:
    def fail() -> None:
        try:
            raise ValueError(FORGED)
        except ValueError as error:
            raise ExceptionGroup(FORGED, [KeyError(FORGED), OSError(FORGED)]) from error

    stream = io.StringIO()
    logger, handler = logger_of("receiver"), logging.StreamHandler(stream)
    logger.addHandler(handler)
    try:
        fail()
    except ExceptionGroup as error:
        logger.error("it broke", exc_info=error, extra={"event": "x"})
    finally:
        logger.removeHandler(handler)
    lines = stream.getvalue().split("\n")
    assert all(line.isprintable() for line in lines)
    assert [line for line in lines if line.startswith("2026")] == []
    assert [line for line in lines if line.startswith("ValueError: so it is\\n2026")]
    assert any("ExceptionGroup: so it is" in line for line in lines)
    assert any("in fail" in line for line in lines)


def test_a_log_record_keeps_no_reference_to_an_error_argument() -> None:
    records: list[logging.LogRecord] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    logger, listener = logger_of("receiver"), Listener()
    logger.addHandler(listener)
    try:
        logger.error("it broke: %s, %g s, %s", ValueError("why"), 0.5, None, extra={"event": "x", "n": 1})
    finally:
        logger.removeHandler(listener)
    assert records[0].args == ("why", 0.5, None)
    assert vars(records[0])["n"] == 1
    assert records[0].getMessage() == "it broke: why, 0.5 s, None"


# A program that observes records through a filter configures no logging.
PROGRAM = """
import logging
import aiotensor
from aiotensor.runtime.logs import logger_of

events = []
logging.getLogger("aiotensor.sender").addFilter(lambda record: events.append(record.event) or True)
logger_of("sender").error("it broke", extra={"event": "peer_lost"})
assert events == ["peer_lost"]
"""


def _run(program: str) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    command = [sys.executable, "-W", "error", "-c", program]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment, timeout=60
    )


def test_a_program_that_has_not_set_logging_up_prints_nothing() -> None:
    done = _run(PROGRAM)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


# In its main process, vLLM loads plugins before it configures logging; in others, afterwards.
VLLM_PROGRAM = """
import logging.config
from aiotensor.integrations.vllm import plugin

plugin.register()
logging.config.dictConfig({
    "version": 1,
    "handlers": {"out": {"class": "logging.StreamHandler", "stream": "ext://sys.stdout"}},
    "loggers": {"vllm": {"handlers": ["out"], "level": "WARNING", "propagate": False}},
})
plugin.register()
"""


def test_warnings_of_the_vllm_plugin_are_printed_before_and_after_vllm_configures_logging(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AIOTENSOR_VLLM", "tensor")
    done = _run(VLLM_PROGRAM)
    for output in (done.stderr, done.stdout):
        (line,) = output.splitlines()
        assert "AIOTENSOR_VLLM='tensor' is unknown" in line


VLLM_LOG = """
import logging.config
from aiotensor.integrations.vllm.processes import log_in_vllm

logging.config.dictConfig({
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"out": {"class": "logging.StreamHandler", "stream": "ext://sys.stdout"}},
    "loggers": {"vllm": {"handlers": ["out"], "level": "INFO", "propagate": False}},
})
for _ in range(2):
    log_in_vllm()
logging.getLogger("aiotensor.receiver").warning("a sender was refused")
logging.getLogger("aiotensor.receiver").info("a sender has connected")
"""


def test_warnings_of_the_library_are_in_the_log_of_vllm() -> None:
    done = _run(VLLM_LOG)
    assert (done.stdout, done.stderr) == ("a sender was refused\n", "")
