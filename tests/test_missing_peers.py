"""A peer that cannot be reached: the log names it while calls wait, and a bug ends their waits."""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from aiotensor import PeerLostError, TensorHandle, TensorReceiver, TensorSender, UsageError
from aiotensor.broadcast import Subscriber
from aiotensor.channel import MessageClient, MessageServer
from aiotensor.runtime import outage
from tests.channel.parties import place
from tests.pairs import endpoint
from verification.patterns import pattern
from verification.places import free_port
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

_ELSEWHERE = TensorHandle("f" * 32, 0, 0, "int64", (3,), "cpu")

# How a role waits for its peer, and the reason that the log states.
_WAITS: dict[str, tuple[Callable[[str], tuple[Any, Callable[[Any], Awaitable[object]]]], str]] = {
    "a sender": (
        lambda here: (TensorSender(here), lambda it: it.ready()),
        "no process listens there",
    ),
    "a sender to a folder that does not exist": (
        lambda _: (TensorSender("unix:///nowhere/s"), lambda it: it.send(pattern(0, 3))),
        "the folder /nowhere does not exist",
    ),
    "a subscriber": (
        lambda here: (Subscriber(here), lambda it: it.receive()),
        "no process listens there",
    ),
    "a client": (
        lambda here: (MessageClient(here, int), lambda it: it.request(1)),
        "no process listens there",
    ),
    "a client on another machine": (
        lambda _: (
            MessageClient(f"tcp://127.0.0.1:{free_port()}", int),
            lambda it: it.request(1),
        ),
        "no process listens there, or it does not answer",
    ),
    "a receiver": (
        lambda here: (TensorReceiver(here), lambda it: it.receive(_ELSEWHERE)),
        "no sender with this id has connected to this receiver",
    ),
}


@pytest.mark.promise(40)
@pytest.mark.parametrize("wait", _WAITS)
async def test_a_long_wait_for_a_peer_is_logged_with_what_is_missing(
    wait: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outage, "_FIRST_LINE_S", 0.01)
    make, reason = _WAITS[wait]

    def reasons() -> list[str]:
        return [record.reason for record in caplog.records if record.event == "peer_missing"]  # type: ignore[attr-defined]

    with place() as here:
        role, call = make(here)
        async with role:
            waiting = asyncio.ensure_future(call(role))
            await until(lambda: bool(reasons()))
            waiting.cancel()
            assert reason in reasons()[0]
            assert len(reasons()) == 1


@pytest.mark.promise(40)
async def test_a_sent_message_that_no_server_has_taken_is_logged_when_it_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with place() as here:
        async with MessageClient(here, int, grace_s=60) as client:
            async with MessageServer(here, int) as server:
                await client.send(1)
                await until(lambda: server.statistics().waiting == 1)
            await until(lambda: client.statistics().servers == 0)
            assert client.statistics().in_flight == 1  # it waits for another server
    [lost] = [record for record in caplog.records if vars(record)["event"] == "message_lost"]
    assert (lost.levelname, lost.name) == ("WARNING", "aiotensor.client")
    assert (
        lost.getMessage()
        == "a message that was sent is lost: this MessageClient was closed: create a new one"
    )


@pytest.mark.usefixtures("link")
@pytest.mark.parametrize("link", ["unix", "tcp"], indirect=True)
async def test_an_unexpected_error_while_connecting_ends_the_waits(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyError("bug")

    with endpoint() as at:
        async with AsyncExitStack() as stack:
            sender = await stack.enter_async_context(TensorSender(at))
            waiting = asyncio.create_task(sender.ready())
            monkeypatch.setattr("aiotensor.sender._Receiver", fail)
            await stack.enter_async_context(TensorReceiver(at))
            with pytest.raises(PeerLostError, match=r"failed: KeyError\('bug'\)"):
                await waiting
            assert any(record.exc_info for record in caplog.records)


async def test_a_peer_is_not_missing_after_a_permanent_failure(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outage, "_FIRST_LINE_S", 0.1)
    with place() as here, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        async with Subscriber(here) as subscriber:
            receiving = asyncio.create_task(subscriber.receive())
            await asyncio.sleep(0)
            other.bind(here.removeprefix("unix://"))
            other.listen()
            with pytest.raises(UsageError, match="is not one of aiotensor"):
                await receiving
            caplog.clear()
            await asyncio.sleep(0.3)
            assert not caplog.records
        os.unlink(here.removeprefix("unix://"))
