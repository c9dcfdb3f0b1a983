"""Names of hosts, resolved in threads of their own.

The system's resolver blocks its caller while its name servers do not answer, for ten seconds and more. ZeroMQ
would call it in the thread that carries all messages, and is given numeric addresses only.
"""

import asyncio
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from aiotensor.channel.options import Target, target_of
from aiotensor.runtime.worker import no_thread

__all__ = ["Lookup", "look_up"]


class Lookup:
    """Resolve a name once, in a daemon thread; belongs to the running loop.

    Nothing can interrupt the system's resolver. Neither the event loop nor the end of the process waits for
    this thread. Each lookup has its own thread, so a silent name server delays no other lookup.

    Args:
        host: the name.
        port: of the targets.
        done: called in the event loop, once, with this lookup, the targets in the order in which to try them,
            and the reason if there are none. Not called after `cancel`.

    Raises:
        OSError: no thread can be started.
    """

    def __init__(
        self, host: str, port: int, done: Callable[["Lookup", Sequence[Target], str], object]
    ) -> None:
        self._host = host
        self._port = port
        self._loop = asyncio.get_running_loop()
        self._done: Callable[[Lookup, Sequence[Target], str], object] | None = done
        try:
            threading.Thread(target=self._run, name="aiotensor-resolving", daemon=True).start()
        except RuntimeError as error:
            raise no_thread(error) from error

    def cancel(self) -> None:
        """Ignore the result. The thread ends when the resolver returns; until then it keeps only this."""
        self._done = None

    def _run(self) -> None:
        targets: Sequence[Target] = ()
        reason = ""
        try:
            targets = _resolve(self._host, self._port)
        except OSError as error:
            reason = error.strerror or str(error)
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._finish, targets, reason)

    def _finish(self, targets: Sequence[Target], reason: str) -> None:
        done, self._done = self._done, None
        if done is not None:
            done(self, targets, reason)


def _resolve(host: str, port: int) -> Sequence[Target]:
    """Resolve a name by the system's resolver.

    Raises:
        OSError: the name cannot be resolved.
    """
    numbers: dict[str, None] = {}
    for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        zone = address[3] if len(address) == 4 else 0
        numbers[f"{address[0]}%{zone}" if zone else str(address[0])] = None
    return tuple(target_of(number, port) for number in numbers)


async def look_up(host: str, port: int, max_wait_s: float) -> Sequence[Target]:
    """Resolve a name, and return the targets in the order in which to try them.

    Waits for the system's resolver, in a thread. Cancelling stops the waiting.

    Args:
        host: the name.
        port: of the targets.
        max_wait_s: after how many seconds the wait ends.

    Raises:
        OSError: the name cannot be resolved, or no thread can be started.
        TimeoutError: the resolver did not return in time.
    """
    result: asyncio.Future[tuple[Sequence[Target], str]] = asyncio.get_running_loop().create_future()

    def looked_up(_: Lookup, targets: Sequence[Target], reason: str) -> None:
        if not result.done():  # the wait may end in the same iteration of the loop
            result.set_result((targets, reason))

    lookup = Lookup(host, port, looked_up)
    try:
        async with asyncio.timeout(max_wait_s):
            targets, reason = await result
    finally:
        lookup.cancel()
    if not targets:
        raise OSError(reason)
    return targets
