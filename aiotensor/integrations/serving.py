"""Open a sender for the lifetime of a server, and drain it at shutdown."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from aiotensor.errors import ClosedError, PeerLostError, RefusedError
from aiotensor.runtime.logs import logger_of
from aiotensor.sender import TensorSender

__all__ = ["serving"]

logger = logger_of("integrations")


@asynccontextmanager
async def serving(make: Callable[[], TensorSender], drain_s: float) -> AsyncIterator[TensorSender]:
    """Open a sender for as long as a server runs.

    At shutdown, the receiver has `drain_s` seconds to take the sent messages; the rest is discarded.

    Args:
        make: a function that creates the sender, called in the process and the event loop of the server.
        drain_s: the time limit for the receiver at shutdown, in seconds.
    """
    async with make() as sender:
        try:
            yield sender
        finally:
            try:
                # If the receiver is lost, the sender has logged the loss of its messages. If the application
                # has closed the sender, nothing is left to drain.
                with suppress(PeerLostError, RefusedError, ClosedError):
                    async with asyncio.timeout(drain_s):
                        await sender.drain()
            except TimeoutError:
                discarded = sender.discard_all()
                logger.warning(
                    "%s messages were not taken within %g s of shutdown and were discarded",
                    discarded,
                    drain_s,
                    extra={"event": "messages_discarded", "messages_lost": discarded, "waited_s": drain_s},
                )
