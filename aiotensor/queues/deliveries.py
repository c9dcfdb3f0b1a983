"""The messages of a producer, from `put` until a consumer has taken them."""

import asyncio
from collections import deque
from functools import partial

from aiotensor.channel.client import MessageClient, request_encoded
from aiotensor.codec.payload import Payload
from aiotensor.errors import ClosedError, PeerLostError, RemoteError, WouldBlockError, again
from aiotensor.memory.gates import Gate
from aiotensor.protocol.credits import Ticket
from aiotensor.queues.folder import Kind, SlotState
from aiotensor.queues.settings import QueueSettings
from aiotensor.runtime.logs import logger_of
from aiotensor.runtime.waiting import Waiters
from aiotensor.types import Usage

__all__ = ["Deliveries"]

logger = logger_of("queues")

# The delays before a message is sent again. A connection that fails at once must not keep the loop busy.
_FIRST_RETRY_S, _LAST_RETRY_S = 0.005, 1.0

# The types of errors after which another attempt may succeed: the consumer has lost the tensors, or has no
# descriptors, memory or threads left. Errors of a message type have other names (`FileNotFoundError`).
_PASSING = ("PeerLostError", "OSError", "BlockingIOError", "MemoryError")

_WATCH_S = 1.0  # between two checks whether any consumer is left

_LONG_WAIT_CHECKS = 10  # without any consumer, after which the wait is logged


class Deliveries:
    """Deliver messages to consumers, each in a task; belongs to the running loop.

    Args:
        client: the open client, with all consumers as its servers.
        settings: the settings of the queue.

    Attributes:
        failure: why no further message can be delivered; None while they can be.
        expects_consumer: whether to wait for the first consumer without limit.
        gate: lets calls wait for the permit of a message, which it has from `put` until it was taken.
        taken: the number of messages that consumers have taken.
        redelivered: how often a message was sent again.
    """

    def __init__(self, client: MessageClient[None], settings: QueueSettings) -> None:
        self.failure: Exception | None = None
        self.expects_consumer = True
        self.gate: Gate[None] = Gate(settings.max_messages, stuck_elsewhere=None, step="wait for a permit")
        self.taken = self.redelivered = 0
        self._client = client
        self._settings = settings
        self._refused: deque[Exception] = deque()  # the errors of refused messages, to be raised once each
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiters = Waiters()  # for the end of all deliveries
        self._timer: asyncio.TimerHandle | None = None
        self._alone_since: float | None = None  # when the last consumer was found to have ended
        self._unopened_checks = 0  # the number of checks that found no consumer, open or ended
        self._is_ended = False

    def __len__(self) -> int:
        """Return the number of accepted messages that were not taken."""
        return len(self._tasks)

    # Capacity

    def acquire_now(self) -> Ticket[None]:
        """Acquire a permit from the gate without waiting, or raise `WouldBlockError`."""
        self.check()
        permit = self.gate.try_request(1)
        if permit is None:
            raise self.full()
        return permit

    def full(self) -> WouldBlockError:
        """Return the error of a call that cannot wait any longer."""
        limit = self.gate.limit
        are_unopened = set(self._settings.folder.states_in_use(Kind.CONSUMER)) == {SlotState.UNUSED}
        return WouldBlockError(
            f"the consumers have not taken the {len(self)} earlier messages of this producer, and "
            f"max_messages={limit}{': no consumer of this queue was opened yet' if are_unopened else ''}",
            messages=Usage(limit, len(self), 1),
        )

    # Deliveries

    def begin(self, payload: Payload, permit: Ticket[None]) -> None:
        """Begin to deliver a message, whose permit is released at the end."""
        task = asyncio.get_running_loop().create_task(self._deliver(payload))
        self._tasks.add(task)
        task.add_done_callback(partial(self._delivered, permit))  # also if it was cancelled before it began
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_WATCH_S, self._watch)

    async def all_taken(self) -> None:
        """Wait until all messages were taken; raise the error of a message that cannot be delivered."""
        while self._tasks and self.failure is None:
            await self._waiters.wait()
        self.check()

    def check(self) -> None:
        """Raise the error of an earlier message that could not be delivered, if there is one."""
        if self.failure is not None:
            raise _copy(self.failure)
        if self._refused:
            raise self._refused.popleft()

    async def _deliver(self, payload: Payload) -> None:
        delay = _FIRST_RETRY_S
        while True:
            try:
                await request_encoded(self._client, payload, self._turn)
            except (PeerLostError, RemoteError) as error:
                if isinstance(error, RemoteError) and error.type_name not in _PASSING:
                    self._refused.append(_copy(error))
                    return
                if not self._settings.redeliver:
                    self._fail(error)
                    return
            except ClosedError:
                return  # the producer was closed
            except Exception as error:  # noqa: BLE001 - raised by the next call of the producer
                self._fail(error)
                return
            else:
                self.taken += 1
                return
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LAST_RETRY_S)
            self.redelivered += 1

    def _delivered(self, permit: Ticket[None], task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        self.gate.release(permit)
        if not self._tasks:
            self._stop_watching()
            self._waiters.wake()

    def _fail(self, error: Exception) -> None:
        if self.failure is None and not self._is_ended:
            self.failure = failure = _copy(error)
            self.gate.fail(lambda: _copy(failure))
            self._waiters.wake()

    # Consumers

    def _watch(self) -> None:
        """Fail the messages if all consumers have ended, and no other one has opened for `grace_s`.

        Log once that no consumer has ever opened.
        """
        loop, grace_s = asyncio.get_running_loop(), self._settings.grace_s
        self._timer = loop.call_later(_WATCH_S, self._watch)
        try:
            states = self._settings.folder.states_in_use(Kind.CONSUMER)
        except PeerLostError as error:
            self._fail(error)
            self._cancel()
            return
        if set(states) == {SlotState.UNUSED}:
            self._unopened_checks += 1
            if self._unopened_checks == _LONG_WAIT_CHECKS:
                self._report_missing_consumers()
            if self.expects_consumer:
                return
        if SlotState.LIVE in states:
            self._alone_since = None
            return
        if self._alone_since is None:
            self._alone_since = loop.time()
        if grace_s is not None and loop.time() - self._alone_since >= grace_s:
            self._fail(
                PeerLostError(
                    f"no consumer of this queue is open, and none has opened for {grace_s:g} s; {len(self)} "
                    "messages of this producer were not taken"
                )
            )
            self._cancel()

    def _report_missing_consumers(self) -> None:
        path = self._settings.folder.path
        logger.warning(
            "messages for the queue in %s have waited for %s s: no consumer was opened yet; waiting: %s",
            path,
            _LONG_WAIT_CHECKS * _WATCH_S,
            len(self),
            extra={"event": "consumers_missing", "address": path, "messages": len(self)},
        )

    def _stop_watching(self) -> None:
        self._alone_since = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # The end

    async def end(self) -> None:
        """Drop the messages that were not taken, and wait for the ends of their tasks."""
        self._is_ended = True
        self._cancel()
        self._stop_watching()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()


def _copy(error: Exception) -> Exception:
    """Return a copy of an error without its traceback, which refers to frames with tensors."""
    copy = again(error)
    copy.__cause__ = None
    return copy
