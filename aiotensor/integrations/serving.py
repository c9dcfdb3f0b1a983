"""Open a sender or a client for the lifetime of a server, and drain the senders at shutdown."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from aiotensor.channel import MessageClient
from aiotensor.errors import AccessDeniedError, ClosedError, PeerLostError, RefusedError
from aiotensor.runtime.logs import logger_of
from aiotensor.sender import TensorSender

__all__ = ["serving", "serving_client"]

logger = logger_of("integrations")

R = TypeVar("R")


@asynccontextmanager
async def serving(
    make: Callable[[], TensorSender], drain_s: float, used: str, instead: str
) -> AsyncIterator[TensorSender]:
    """Open a sender for as long as a server runs.

    At shutdown, the receiver has `drain_s` seconds to take the sent messages; the rest is discarded.

    Args:
        make: a function that creates the sender, called in the process and the event loop of the server.
        drain_s: the time limit for the receiver at shutdown, in seconds.
        used: the name of the public object that the application passed `make` to.
        instead: the name of the public object for message clients.

    Raises:
        TypeError: `make` returned a message client.
    """
    _check(sender := make(), MessageClient, used, instead)
    async with sender:
        try:
            yield sender
        finally:
            await _drain([sender], drain_s)


@asynccontextmanager
async def serving_client(
    make: Callable[[], MessageClient[R]], drain_s: float, used: str, instead: str
) -> AsyncIterator[MessageClient[R]]:
    """Open a client for as long as a server runs, and drain its senders at shutdown, as `serving` does."""
    _check(client := make(), TensorSender, used, instead)
    async with client:
        try:
            yield client
        finally:
            await _drain(client.senders, drain_s)


def _check(made: object, wrong: type, used: str, instead: str) -> None:
    if isinstance(made, wrong):
        raise TypeError(f"the function passed to {used} returned a {wrong.__name__}: use {instead}")


async def _drain(senders: Sequence[TensorSender], drain_s: float) -> None:
    try:
        async with asyncio.timeout(drain_s):
            await asyncio.gather(*map(_drain_one, senders))
    except TimeoutError:
        discarded = sum(sender.discard_all() for sender in senders if sender.affinity.is_open)
        logger.warning(
            "%s messages were not taken within %g s of shutdown and were discarded",
            discarded,
            drain_s,
            extra={"event": "messages_discarded", "messages_lost": discarded, "waited_s": drain_s},
        )


async def _drain_one(sender: TensorSender) -> None:
    # If the receiver is lost, the sender has logged the loss of its messages. If it denies access, no message
    # was announced to it. If the application has closed the sender, nothing is left to drain.
    with suppress(PeerLostError, RefusedError, AccessDeniedError, ClosedError):
        await sender.drain()
