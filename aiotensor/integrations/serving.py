"""Open a sender for the lifetime of a web server, and drain it at shutdown."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from aiotensor.errors import AccessDeniedError, ClosedError, PeerLostError, RefusedError
from aiotensor.runtime.logs import logger_of
from aiotensor.sender import TensorSender

__all__ = ["serving"]

logger = logger_of("integrations")


@asynccontextmanager
async def serving(make: Callable[[], TensorSender], drain_s: float) -> AsyncIterator[TensorSender]:
    """Open a sender for as long as a server runs.

    At shutdown, the receiver has `drain_s` seconds to take the sent messages; the rest is discarded. A client
    needs nothing like it: its requests end with their handlers, and the server keeps other messages.

    Args:
        make: a function that creates the sender, called in the process and the event loop of the server.
        drain_s: the time limit for the receiver at shutdown, in seconds.
    """
    async with make() as sender:
        try:
            yield sender
        finally:
            # If the receiver is lost, the sender has logged the loss of its messages. If it denies access, no
            # message was announced to it. If the application has closed the sender, nothing is left to drain.
            with suppress(PeerLostError, RefusedError, AccessDeniedError, ClosedError):
                try:
                    async with asyncio.timeout(drain_s):
                        await sender.drain()
                except TimeoutError:
                    discarded = sender.discard_all()
                    logger.warning(
                        "%s messages were not taken within %g s of shutdown and were discarded",
                        discarded,
                        drain_s,
                        extra={
                            "event": "messages_discarded",
                            "messages_lost": discarded,
                            "waited_s": drain_s,
                        },
                    )
