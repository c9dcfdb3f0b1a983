"""A peer that breaks the protocol or floods a server loses its connection, and no other peer is affected."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest

from aiotensor import PeerLostError, ProtocolError, RefusedError, RemoteError
from aiotensor.channel import MessageClient, MessageServer
from aiotensor.protocol.frames import (
    ARENA,
    INLINE,
    VERSION,
    Begin,
    Failure,
    Frame,
    Message,
    PlacedTensor,
    Release,
    Taken,
)
from tests.channel.parties import (
    Answer,
    Channel,
    Question,
    channel,
    key_options,
    place,
    said,
    serving,
    settled,
)
from tests.channel.rogues import RogueServer, heard, message, rogue_client, rogue_server
from tests.frames import put
from tests.selection import COMPLETE
from verification.attackers import ATTACKS, WITHOUT_KEYS, attacked
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

LIMIT = 10_000  # of bodies, in both directions

decoded: list[object] = []


class Seen(msgspec.Struct):
    """A message that records its decoding."""

    data: Any = None

    def __post_init__(self) -> None:
        decoded.append(self)


def ask(number: int = 0, content: object = None, *tensors: PlacedTensor, **changes: object) -> Message:
    """Announce a request, by default a valid one."""
    return message(number, Question(number) if content is None else content, tensors, asks=True, **changes)


def tensor(placement: str = ARENA, payload: bytes = b"\x00" * 16) -> PlacedTensor:
    """Describe a tensor in a block that was never shared."""
    return PlacedTensor("uint8", (3,), placement, payload, 5)


NOTHING = b"\xc1"  # which begins no value


# The last frame breaks the protocol; tests/protocol shows the rules of all roles.
OF_CLIENTS: dict[str, tuple[str, Sequence[Frame | bytes]]] = {
    "noise": ("cannot be decoded", [b"\xc1noise"]),
    "a message for a receiver": ("a frame that no client sends", [put(last=True)]),
    "a message in several frames": ("a frame that no client sends", [Begin(0)]),
    "more than max_waiting": ("more than 4 of its messages wait", [ask(number) for number in range(5)]),
    "a release of nothing": ("released block 5 more often", [Release((5,))]),
    "content that is none": ("cannot be decoded", [ask(payload=NOTHING, nbytes=1)]),
    "less content than announced": ("but announced 900", [ask(nbytes=900)]),
    "content in no memory": ("segment", [ask(placement=ARENA, block=5, payload=bytes(16))]),
    "a tensor in no memory": ("segment", [ask(0, Question(0), tensor())]),
    "a tensor elsewhere": ("unknown placement 'inline'", [ask(0, Question(0), tensor(INLINE))]),
    "a body beyond the limit": (
        f"a body of {LIMIT + 11} bytes, more than max_body_bytes={LIMIT}",
        [ask(0, {"data": bytes(LIMIT + 2)})],
    ),
}  # fmt: skip


@asynccontextmanager
async def served(**server: object) -> AsyncIterator[Channel]:
    """Open a channel whose server answers an honest client throughout."""
    async with channel(server=server) as ends, serving(ends.server):
        yield ends
        got = await ends.client.request(Question(5, pattern(5, BIG), wish="3"))
        assert got.total == int(pattern(5, BIG).sum())
        assert ends.client.statistics().servers_lost == 0
        await settled(ends)


@pytest.mark.promise(24, 25)
@pytest.mark.parametrize(("reason", "frames"), OF_CLIENTS.values(), ids=OF_CLIENTS)
async def test_a_client_that_breaks_the_protocol_is_disconnected_and_affects_no_other(
    reason: str, frames: Sequence[Frame | bytes]
) -> None:
    decoded.clear()
    with place() as here, said() as texts:
        async with (
            MessageServer(here, Seen, max_waiting=4, max_body_bytes=LIMIT) as server,
            MessageClient(here, int) as client,
        ):
            asking = asyncio.create_task(client.request({"data": 1}))
            honest = await anext(server)
            iterating = asyncio.create_task(anext(server)) if len(frames) < 4 else None
            async with rogue_client(here) as rogue:
                rogue.write(*frames)
                await rogue.is_lost.wait()
                await until(lambda: server.statistics().clients == 1)
            await until(lambda: any("broke the protocol" in text for text in texts))
            [text] = [text for text in texts if "broke the protocol" in text and "lost:" not in text]
            assert reason in text
            await honest.answer(2)
            assert await asking == 2
            asking = asyncio.create_task(client.request({"data": 3}))
            request = await anext(server) if iterating is None else await iterating
            await request.answer(4)
            assert await asking == 4
            assert [one.data for one in decoded if isinstance(one, Seen)] == [1, 3]
            assert client.statistics().servers_lost == 0


BAD: list[tuple[Message, str]] = [
    (ask(0, NOTHING), "cannot be decoded"),
    (ask(1, 5), "Expected a Struct, a dataclass or a dict, got `int`"),
    (ask(2, b""), "cannot be decoded"),
    (ask(3, {"seed": "x"}), "Expected `int`, got `str`"),
]


@pytest.mark.promise(31)
async def test_an_invalid_message_fails_without_affecting_later_ones() -> None:
    with said():
        async with served() as ends, rogue_client(ends.place) as rogue:
            for bad, reason in BAD:
                rogue.write(bad)
                await until(lambda: ends.server.statistics().failures == bad.message + 1)  # noqa: B023
                await until(lambda: len(_failures(rogue.received)) == bad.message + 1)  # noqa: B023
                assert reason in _failures(rogue.received)[-1].text
            rogue.write(ask(len(BAD)))
            [good] = await heard(rogue, Message)
            assert good.answers == len(BAD)


def _failures(frames: Sequence[Frame]) -> list[Failure]:
    return [frame for frame in frames if isinstance(frame, Failure)]


@pytest.mark.promise(26)
async def test_a_client_that_never_reads_its_answers_is_disconnected() -> None:
    async def fail(question: Question) -> Answer:
        raise ValueError("x" * 8000)

    with said() as texts:
        async with channel() as ends, serving(ends.server, handler=fail):
            async with rogue_client(ends.place, reads=False, max_messages=1 << 20) as rogue:
                number = 0
                while ends.server.statistics().clients_lost == 0:
                    assert number < 3000
                    rogue.write(*map(ask, range(number, number + 20)))
                    number += 20
                    await until(
                        lambda: (
                            ends.server.statistics().failures >= number  # noqa: B023
                            or ends.server.statistics().clients_lost == 1
                        )
                    )
            with pytest.raises(RemoteError, match=r"x{8000}"):
                await ends.client.request(Question(1))
            assert (ends.server.statistics().waiting, ends.server.statistics().in_hand) == (0, 0)
    assert any("was disconnected: writing to it failed" in text for text in texts)


# Servers


@asynccontextmanager
async def asked(
    endpoint: str, **client: Any
) -> AsyncIterator[tuple[RogueServer, "asyncio.Task[Seen]", MessageClient[Seen]]]:
    """Open a client that waits for the answer to a request from a rogue server."""
    async with rogue_server(endpoint) as rogue, MessageClient(endpoint, Seen, **client) as asking:
        task = asyncio.create_task(asking.request(1))
        [question] = await heard(rogue, Message)
        assert question.asks
        yield rogue, task, asking


OF_SERVERS: dict[str, tuple[str, Sequence[Frame | bytes]]] = {
    "noise": ("cannot be decoded", [b"\xc1noise"]),
    "a message of a sender": ("a frame that no server sends", [put(last=True)]),
    "a request": ("a message that answers nothing", [ask()]),
    "a release of nothing": ("released block 5 more often", [Release((5,))]),
    "content that is none": ("cannot be decoded", [message(0, 1, answers=0, payload=NOTHING, nbytes=1)]),
    "a tensor in no memory": ("segment", [message(0, 1, [tensor()], answers=0)]),
    "a body beyond the limit": (
        f"a body of {LIMIT + 11} bytes, more than max_body_bytes={LIMIT}",
        [message(0, {"data": bytes(LIMIT + 2)}, answers=0)],
    ),
}  # fmt: skip


@pytest.mark.promise(24)
@pytest.mark.parametrize(("reason", "frames"), OF_SERVERS.values(), ids=OF_SERVERS)
async def test_requests_to_a_server_that_breaks_the_protocol_fail(
    reason: str, frames: Sequence[Frame | bytes]
) -> None:
    decoded.clear()
    with place() as here, said() as texts:
        async with asked(here, max_body_bytes=LIMIT) as (rogue, asking, client):
            rogue.write(Taken((0,)))
            for frame in frames:
                rogue.write(frame)
            with pytest.raises((PeerLostError, ProtocolError), match=reason) as caught:
                await asking
            if isinstance(caught.value, PeerLostError):
                assert isinstance(caught.value.__cause__, ProtocolError)
            await rogue.is_lost.wait()
            assert client.statistics().servers_lost == 1
            assert not decoded
    assert any("broke the protocol" in text and reason in text for text in texts)


async def test_an_unreadable_answer_fails_only_its_request() -> None:
    with place() as here:
        async with asked(here) as (rogue, asking, client):
            another = asyncio.create_task(client.request(2))
            await until(lambda: client.statistics().messages_sent == 2)
            for frame in (Taken((0, 1)), message(0, NOTHING, answers=0), message(1, {"data": 4}, answers=1)):
                rogue.write(frame)
            with pytest.raises(ProtocolError, match="cannot be decoded"):
                await asking
            assert (await another).data == 4
            assert client.statistics().servers_lost == 0


async def test_a_server_of_another_version_is_refused_and_its_successor_gets_the_next_request() -> None:
    with place() as here:
        async with MessageClient(here, Answer) as client:
            async with rogue_server(here, version=VERSION + 1):
                with pytest.raises(RefusedError, match=f"has protocol version {VERSION + 1}, and the client"):
                    await client.request(Question(1))
            asking = asyncio.create_task(client.request(Question(2)))  # looks for a server again
            async with MessageServer(here, Question) as server:
                await (await anext(server)).answer(Answer(2))
                assert (await asking).seed == 2


# Floods


@pytest.mark.promise(26)
@pytest.mark.parametrize(
    "attacks",
    [WITHOUT_KEYS, *[pytest.param([attack], marks=pytest.mark.extended) for attack in ATTACKS]],
    ids=["all", *ATTACKS],
)
async def test_clients_are_served_while_others_flood_their_server(attacks: Sequence[str]) -> None:
    server_keys, client_keys = key_options()
    async with (
        MessageServer("tcp://127.0.0.1:0", Question, **server_keys) as server,
        MessageClient(server.address, Answer, **client_keys) as existing,
        serving(server),
    ):
        address = server.address
        assert (await existing.request(Question(0))).seed == 0

        async def ask() -> None:
            for seed in range(100 if COMPLETE else 20):
                assert (await existing.request(Question(seed))).seed == seed

        with ExitStack() as attackers:
            for attack in attacks:
                await asyncio.to_thread(attackers.enter_context, attacked(address, attack))
            asking = asyncio.create_task(ask())
            for seed in range(4 if COMPLETE else 2):
                async with MessageClient(address, Answer, **client_keys) as new:
                    assert (await new.request(Question(seed))).seed == seed
            await asking
            await asyncio.to_thread(attackers.close)
        assert existing.statistics().servers_lost == 0
