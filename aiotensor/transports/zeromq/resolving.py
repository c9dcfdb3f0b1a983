"""Names of hosts, resolved in threads of their own.

The system's resolver blocks its caller while its name servers do not answer, for ten seconds and more. ZeroMQ
would call it in the thread that carries all messages, and is given numeric addresses only.
"""

import asyncio
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

from aiotensor.runtime.worker import no_thread
from aiotensor.transports.zeromq.addresses import Target, target_of

__all__ = ["look_up"]


def look_up(host: str, port: int) -> "asyncio.Future[Sequence[Target]]":
    """Begin to resolve a name in a daemon thread; return the future of the targets, in the order to try them.

    Nothing can interrupt the system's resolver. Neither the event loop nor the end of the process waits for
    this thread. Each lookup has its own thread, so a silent name server delays no other lookup. Cancelling
    the future ignores the result. The future fails with `OSError` if the name cannot be resolved.

    Raises:
        OSError: no thread can be started.
    """
    loop = asyncio.get_running_loop()
    found: asyncio.Future[Sequence[Target]] = loop.create_future()

    def finish(targets: Sequence[Target], reason: str) -> None:
        if found.done():
            return
        if targets:
            found.set_result(targets)
        else:
            found.set_exception(OSError(reason))

    def run() -> None:
        targets: Sequence[Target] = ()
        reason = ""
        try:
            targets = _resolve(host, port)
        except OSError as error:
            reason = error.strerror or str(error)
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(finish, targets, reason)

    try:
        threading.Thread(target=run, name="aiotensor-resolving", daemon=True).start()
    except RuntimeError as error:
        raise no_thread(error) from error
    return found


def _resolve(host: str, port: int) -> Sequence[Target]:
    """Resolve a name by the system's resolver."""
    numbers: dict[str, None] = {}
    for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        zone = address[3] if len(address) == 4 else 0
        numbers[f"{address[0]}%{zone}" if zone else str(address[0])] = None
    return tuple(target_of(number, port) for number in numbers)
