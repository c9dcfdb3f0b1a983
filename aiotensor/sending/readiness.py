"""The waits of a sender for a receiver: until a receiver has admitted it, or is connected and reads."""

from aiotensor.errors import AioTensorError, WouldBlockError
from aiotensor.runtime.arguments import count
from aiotensor.runtime.waiting import at_most
from aiotensor.sending.grants import Grants
from aiotensor.sending.message import Message
from aiotensor.sending.sessions import Sessions
from aiotensor.sending.sizes import too_large

__all__ = ["Readiness"]


class Readiness:
    """Wait for the receiver of one sender.

    Args:
        sessions: the connections to receivers.
        grants: the messages in flight.
        max_wait_s: the time in seconds after which a wait ends with `WouldBlockError`; None for never.
    """

    def __init__(self, sessions: Sessions, grants: Grants, max_wait_s: float | None) -> None:
        self._sessions = sessions
        self._grants = grants
        self._max_wait_s = max_wait_s

    async def ready(self, nbytes: int | None) -> None:
        """Wait until a receiver has admitted this sender, as `TensorSender.ready` does."""
        limit = self._grants.memory.gate.budget.limit
        if nbytes is not None:
            nbytes = count("nbytes", nbytes, 0)
            if nbytes > limit:
                raise too_large(nbytes, limit)
        if self._obstacle(nbytes) is None:
            return
        try:
            async with at_most(self._max_wait_s, lambda: self._not_ready(nbytes)):
                await self._sessions.admission()
                while self._obstacle(nbytes) is not None:
                    await self._grants.capacity()
                    await self._sessions.admission()
        except WouldBlockError:
            if self._obstacle(nbytes) is not None:  # it may have been removed when the time expired
                raise

    async def receiver_reads(self, message: Message) -> None:
        """Wait until a receiver is connected and reads; raise an error if the message ends before that."""
        self._grants.check_open(message)  # a message lost during its copy must not wait for the next receiver
        message.awaits_receiver += 1
        try:
            async with at_most(self._max_wait_s, self._nothing_read):
                while not self._sessions.is_ready:
                    if self._sessions.outage.is_too_long:
                        raise self._sessions.unavailable()
                    await self._sessions.change()
                    self._grants.check_open(message)
        except WouldBlockError:
            if not self._sessions.is_ready:  # a receiver may have become ready when the time expired
                raise
            self._grants.check_open(message)
        finally:
            message.awaits_receiver -= 1

    def refusal(self, nbytes: int) -> AioTensorError:
        """Return the error of a call that would have to wait for the receiver.

        Args:
            nbytes: the bytes of shared memory that the call needs, for the text of the error.
        """
        sessions, where = self._sessions, self._grants.holders.where
        if sessions.current is None:
            reason = f"no receiver is connected{where}"
        elif sessions.current.transport.is_writable:
            reason = f"the receiver{where} has not answered"
        else:
            reason = "the receiver is slow to read"
        return sessions.refusal() or self._grants.holders.would_block(reason, 1, nbytes)

    def _obstacle(self, nbytes: int | None) -> str | None:
        """Return the reason why `ready` must wait; None if it need not."""
        if not self._sessions.is_admitted:
            is_there, where = self._sessions.is_receiver_there, self._grants.holders.where
            return (
                f"the receiver{where} has not answered" if is_there else f"no receiver was connected{where}"
            )
        if nbytes is None:
            return None
        return self._grants.shortage(nbytes) if self._sessions.is_ready else "the receiver read nothing"

    def _not_ready(self, nbytes: int | None) -> WouldBlockError:
        reason = self._obstacle(nbytes) or "the sender was not ready"
        return self._grants.holders.overdue(reason, nbytes is not None, nbytes or 0)

    def _nothing_read(self) -> WouldBlockError:
        holders, is_connected = self._grants.holders, self._sessions.current is not None
        reason = "the receiver read nothing" if is_connected else f"no receiver was connected{holders.where}"
        return holders.overdue(reason, 1, 0)
