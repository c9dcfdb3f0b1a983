"""Arguments: numbers of numpy work like Python's, and wrong objects raise errors that name a remedy."""

import asyncio
from collections.abc import Iterator
from inspect import signature
from typing import Any

import numpy as np
import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from aiotensor import RemoteError, TensorReceiver, TensorSender, blocking
from aiotensor.broadcast import Publisher, Subscriber
from aiotensor.channel import MessageClient, MessageServer
from aiotensor.queues import MessageQueue
from aiotensor.ranks import RankPipe
from aiotensor.runtime import arguments
from tests.channel.parties import place

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@pytest.fixture
def here() -> Iterator[str]:
    """Return an address."""
    with place() as here:
        yield here


_AT = "unix:///tmp/nobody"
_ROLES: dict[Any, dict[str, Any]] = {
    TensorReceiver: {"endpoint": _AT},
    TensorSender: {"endpoint": _AT},
    MessageServer: {"endpoint": _AT, "message_type": int},
    MessageClient: {"endpoints": _AT, "answer_type": int},
    Publisher: {"endpoint": _AT},
    Subscriber: {"endpoint": _AT},
    MessageQueue: {},
    RankPipe: {"group": HashStore(), "peer": 1, "rank": 0, "world_size": 2},
}
_INTEGERS = ("<class 'int'>", "int | None")
_SECONDS = ("<class 'float'>", "float | None")


def _numbers_of(kind: Any) -> dict[str, str]:
    """Return the parameters of a class that are numbers, with the error for other values."""
    types = {name: str(parameter.annotation) for name, parameter in signature(kind).parameters.items()}
    for elsewhere in ("peer_timeout_s", "peer", "rank", "world_size"):  # for other machines and processes
        types.pop(elsewhere, None)
    return {
        name: "must be an integer" if of in _INTEGERS else "must be a number of seconds"
        for name, of in types.items()
        if of in _INTEGERS or of in _SECONDS
    }


def test_every_number_of_the_wrong_type_is_refused_with_its_name() -> None:
    found = {kind: _numbers_of(kind) for kind in _ROLES}
    assert all(found.values())
    for kind, names in found.items():
        for name, reason in names.items():
            with pytest.raises(TypeError, match=f"{name} {reason}, got '5'"):
                kind(**{**_ROLES[kind], name: "5"})


def test_numbers_of_numpy_become_numbers_of_python() -> None:
    assert type(arguments.count("n", np.int64(4))) is int  # type: ignore[arg-type]
    for number in (arguments.seconds, arguments.seconds_or_never):
        assert type(number("s", np.float32(60))) is float  # type: ignore[arg-type]
    assert type(arguments.grace_period(np.float32(60))) is float  # type: ignore[arg-type]


async def test_the_wrong_with_statement_names_the_right_one(here: str) -> None:
    with (
        pytest.raises(TypeError, match="use `async with` for this TensorSender, or `with` for an"),
        TensorSender(here),  # type: ignore[attr-defined]
    ):
        pass
    with pytest.raises(TypeError, match="use `with` for this TensorSender, or `async with` for the class in"):
        async with blocking.TensorSender(here):  # type: ignore[attr-defined]
            pass


async def test_a_handler_of_the_wrong_kind_is_reported(here: str) -> None:
    def answer(message: object) -> object:
        return message

    async def answer_in_a_loop(message: object) -> object:
        return message

    wrong: Any = answer
    options: dict[str, Any]
    for options in ({}, {"max_batch": 2}):
        async with (
            MessageServer(here, int) as server,
            MessageClient(here, answer_type=int) as client,
        ):
            serving = asyncio.create_task(server.serve(wrong, **options))
            with pytest.raises(RemoteError, match="in place of a coroutine: define it with `async def`"):
                await client.request(1)
            await server.aclose()
            await serving

    def serve_in_a_thread() -> None:
        with (
            blocking.MessageServer(here, int) as server,
            pytest.raises(TypeError, match="is a coroutine function"),
        ):
            server.serve(answer_in_a_loop)

    await asyncio.to_thread(serve_in_a_thread)
