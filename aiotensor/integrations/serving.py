"""What every server does with a sender: opens it for its own life, and lets go of it without haste."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from aiotensor.errors import ClosedError, PeerLostError, RefusedError
from aiotensor.logs import logger_of
from aiotensor.sender import TensorSender

__all__ = ["serving"]

logger = logger_of("integrations")


@asynccontextmanager
async def serving(make: Callable[[], TensorSender], drain_s: float) -> AsyncIterator[TensorSender]:
    """Open a sender for as long as a server runs.

    At the end the receiver has some seconds to take what was sent; what it has not taken by then is
    discarded, since nobody is left who would want it.

    Args:
        make: makes the sender, in the process and the loop of the server.
        drain_s: how many seconds the receiver has.
    """
    async with make() as sender:
        try:
            yield sender
        finally:
            try:
                # A receiver that is lost takes all of it along, which the sender has logged. A sender that
                # the application has closed has nothing left to drain.
                with suppress(PeerLostError, RefusedError, ClosedError):
                    async with asyncio.timeout(drain_s):
                        await sender.drain()
            except TimeoutError:
                discarded = sender.discard_all()
                logger.warning(
                    "%s messages were not taken within %g s of the end, and are discarded",
                    discarded,
                    drain_s,
                    extra={"event": "messages_discarded", "messages_lost": discarded, "waited_s": drain_s},
                )
