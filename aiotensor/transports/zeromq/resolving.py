"""The resolution of host names, in separate threads.

The system's resolver blocks its caller while its name servers do not answer, for ten seconds or more. ZeroMQ
would call it in the thread that carries all messages, so ZeroMQ is only given numeric addresses.
"""

import asyncio
import socket
from collections.abc import Sequence

from aiotensor.runtime.detached import run_detached
from aiotensor.transports.zeromq.addresses import Target, target_of

__all__ = ["look_up"]


def look_up(host: str, port: int) -> "asyncio.Future[Sequence[Target]]":
    """Begin to resolve a name in a daemon thread; return the future of the targets, in the order to try them.

    Nothing can interrupt the system's resolver. Cancelling the future ignores the result. The future fails
    with `OSError` if the name cannot be resolved.

    Raises:
        OSError: no thread can be started.
    """
    return run_detached("aiotensor-resolving", lambda: _resolve(host, port))


def _resolve(host: str, port: int) -> Sequence[Target]:
    """Resolve a name with the system's resolver."""
    numbers: dict[str, None] = {}
    for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        zone = address[3] if len(address) == 4 else 0
        numbers[f"{address[0]}%{zone}" if zone else str(address[0])] = None
    return tuple(target_of(number, port) for number in numbers)
