"""Keys and limits of servers, and options that are rejected before any connection is made."""

from typing import Any

import pytest

from aiotensor import AccessDeniedError, RefusedError, TensorQueue
from aiotensor.channel import MessageClient, MessageServer
from tests.channel.parties import Answer, Question, channel, key_options, place, serving
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

WRONG: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"arena_bytes": 0}, ValueError),
    ({"max_body_bytes": 0}, ValueError),
    ({"max_body_bytes": 1.5}, TypeError),
    ({"secret_key": "x" * 40}, ValueError),
    ({"peer_timeout_s": 1.0}, ValueError),
]
WRONG_FOR_CLIENTS: list[tuple[dict[str, Any], type[Exception]]] = [
    *[({"max_wait_s": wrong}, ValueError) for wrong in (0, -0.5, float("nan"))],
    *[({"grace_s": wrong}, ValueError) for wrong in (-1.0, float("nan"))],
    ({"max_wait_s": "soon"}, TypeError),
    ({"max_concurrent_videos": 0}, ValueError),
]
WRONG_FOR_SERVERS: list[tuple[dict[str, Any], type[Exception]]] = [
    ({name: 0}, ValueError) for name in ("max_clients", "max_waiting", "max_mapped_bytes")
]


def test_options_are_checked_when_an_object_is_made() -> None:
    for wrong, error in WRONG + WRONG_FOR_SERVERS:
        with pytest.raises(error):
            MessageServer("unix:///tmp/s", Question, **wrong)
    for wrong, error in WRONG + WRONG_FOR_CLIENTS:
        with pytest.raises(error):
            MessageClient("unix:///tmp/s", Answer, **wrong)
    with pytest.raises(ValueError, match="at least one server"):
        MessageClient([], Answer)
    with pytest.raises(ValueError, match=r"could connect.*secret_key and client_keys"):
        MessageServer("tcp://*:5555", Question)
    with pytest.raises(ValueError, match=r"could connect.*secret_key and server_key"):
        MessageClient(["unix:///tmp/s", "tcp://engine:5555"], Answer)


async def test_one_client_reaches_servers_at_endpoints_of_several_kinds() -> None:
    with place() as here:
        queue = TensorQueue()
        async with (
            MessageServer(here, Question) as one,
            MessageServer(queue, Question) as another,
            MessageServer("tcp://127.0.0.1:0", Question) as third,
            serving(one, another, third),
            MessageClient([here, queue, third.address], Answer) as client,
        ):
            await until(lambda: client.statistics().servers == 3)
            for target in range(3):
                got = await client.request(Question(1, pattern(target, BIG)), target=target)
                assert got.total == int(pattern(target, BIG).sum())


@pytest.mark.promise(37)
async def test_only_clients_with_the_right_keys_are_served() -> None:
    of_server, right = key_options()
    _, stranger = key_options()
    async with (
        MessageServer("tcp://127.0.0.1:0", Question, **of_server) as server,
        MessageClient(server.address, Answer, **right) as client,
    ):
        await client.send(Question(1))
        assert (await anext(server)).message.seed == 1
        for wrong in (
            {**stranger, "server_key": right["server_key"]},  # not in the list
            {**right, "server_key": stranger["server_key"]},  # another server's
            {},
        ):
            async with MessageClient(server.address, Answer, **wrong) as refused:
                for _ in range(2):  # who asks again tries again
                    with pytest.raises(AccessDeniedError, match="keys"):
                        await refused.request(Question(2))
        await client.send(Question(3))
        assert (await anext(server)).message.seed == 3
        assert server.statistics().messages_received == 2


@pytest.mark.parametrize("limit", ["max_clients", "max_mapped_bytes"])
async def test_a_client_beyond_a_limit_of_the_server_is_refused(limit: str) -> None:
    most = 1 if limit == "max_clients" else (1 << 20) + 1
    async with (
        channel(arena_bytes=1 << 20, server={limit: most}) as ends,
        MessageClient(ends.place, Answer, arena_bytes=1 << 20) as other,
    ):
        for _ in range(2):
            with pytest.raises(RefusedError, match=rf"refused this client.*{limit}={most}"):
                await other.request(Question(1))
        assert ends.server.statistics().clients_refused >= 2
        await ends.client.send(Question(2))
        assert (await anext(ends.server)).message.seed == 2
        await ends.client.aclose()
        await until(lambda: ends.server.statistics().mapped_bytes == 0)
        await other.send(Question(3))
        assert (await anext(ends.server)).message.seed == 3
